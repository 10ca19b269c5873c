#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "gradwire/codec.h"
#include "gradwire/status.h"
#include "stages/float_clip/float_clip.h"

namespace gradwire {

struct InceptionnParameters {
  static constexpr int kBounds[] = {10, 8, 6};

  uint16_t bound = 0;  // index of kBounds: 2^-10, 2^-8, 2^-6
  ClipMode mode = ClipMode::kPaper;

  // The limits that the tags depend on.
  [[nodiscard]] FloatClip clip() const { return float_clip(kBounds[bound], mode); }
};

// How many values of a payload take 0, 8, 16 and 32 bits.
using ClassCounts = std::array<uint64_t, 4>;

// Nothing if the codec is another, or if no value was encoded. The payload passed check_size;
// kCorruptPayload: it has bursts that no decoder accepts.
[[nodiscard]] Result<std::optional<ClassCounts>> count_classes(const Codec& codec, uint64_t n,
                                                               std::span<const std::byte> payload);

}  // namespace gradwire
