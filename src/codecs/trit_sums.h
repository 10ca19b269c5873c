#pragma once

// Sums of trits that share scales: added as integers, never decoded, and sent as whole levels
// (TernGrad, section 3, scaler sharing).

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "codecs/qsgd/qsgd_shape.h"
#include "codecs/ternary.h"
#include "gradwire/execution.h"
#include "gradwire/status.h"

namespace gradwire {

// Adds the trits of a payload to as many sums. At most 127 payloads make a sum. kCorruptPayload if
// decoding refuses the payload; some trits are added then.
Status add_trits(const TernaryShape& shape, std::string_view name,
                 std::span<const std::byte> payload, std::span<int8_t> sums, Execution& execution);

// Whether each group of `sums` lies in one group of `trits`, so that it has one scale.
[[nodiscard]] bool groups_fit(const Groups& trits, const Groups& sums);

// The payload of a qsgd frame that decodes to sum * scale / shape.levels. scales: one f32 for each
// group of `trits`; groups_fit is true. No sum is above shape.levels. Returns the payload's size: 0
// where all scales are 0.
uint64_t encode_trit_sums(const QsgdShape& shape, const Groups& trits, const std::byte* scales,
                          std::span<const int8_t> sums, std::span<std::byte> payload,
                          Execution& execution);

}  // namespace gradwire
