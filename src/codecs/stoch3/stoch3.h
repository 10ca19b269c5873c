#pragma once

#include <cstdint>
#include <optional>

#include "base/private_export.h"
#include "codecs/ternary.h"
#include "gradwire/codec.h"

namespace gradwire {

struct Stoch3Parameters {
  TernaryCoder coder = TernaryCoder::kNone;
  uint32_t bucket = 0;  // values that share a scale, a multiple of 320; 0: the whole segment

  [[nodiscard]] TernaryShape shape(uint64_t n) const { return {n, coder, bucket}; }
};

// Of a codec stoch3; nothing for others.
[[nodiscard]] GW_PRIVATE_EXPORT std::optional<Stoch3Parameters> stoch3_parameters(
    const Codec& codec);

}  // namespace gradwire
