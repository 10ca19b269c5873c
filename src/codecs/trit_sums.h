#pragma once

// Sums of trits that share scales: added as integers, never decoded, and sent as whole levels
// (TernGrad, section 3, scaler sharing).

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "codecs/qsgd/qsgd_shape.h"
#include "codecs/ternary.h"
#include "gradwire/execution.h"
#include "gradwire/status.h"

namespace gradwire {

// The sums of the trits of several payloads. They are added as int8, and moved to int16 before they
// could leave its range.
class TritSums {
 public:
  TritSums() = default;
  // Sums of n values, of at most `most` payloads: 1 to kLargestLevel.
  TritSums(uint64_t n, uint32_t most);

  void clear();
  // Adds a payload with as many trits. kCorruptPayload if decoding refuses the payload; some trits
  // are added then.
  Status add(const TernaryShape& shape, std::string_view name, std::span<const std::byte> payload,
             Execution& execution);
  // The payload of a qsgd frame that decodes to sum * scale / shape.levels. scales: one f32 for
  // each group of `trits`; groups_fit is true. shape.levels is `most`. Returns the payload's size:
  // 0 where all scales are 0.
  uint64_t encode(const QsgdShape& shape, const Groups& trits, const std::byte* scales,
                  std::span<std::byte> payload, Execution& execution);

 private:
  void widen();

  std::vector<int8_t> sums_;
  std::vector<int16_t> wide_;  // empty if int8 holds the sums of all payloads
  uint32_t added_ = 0;         // payloads in sums_
};

// Whether each group of `sums` lies in one group of `trits`, so that it has one scale.
[[nodiscard]] bool groups_fit(const Groups& trits, const Groups& sums);

}  // namespace gradwire
