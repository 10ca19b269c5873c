#pragma once

#include <cstdint>
#include <optional>

#include "base/private_export.h"
#include "codecs/ternary.h"
#include "gradwire/codec.h"

namespace gradwire {

struct ThreeLcParameters {
  float sparsity = 1.0f;  // s, in [1, 2); the encoder's business alone
  TernaryCoder coder = TernaryCoder::kZeroRun;
  uint32_t bucket = 0;  // values that share a scale, a multiple of 5; 0: the whole segment
};

// Of a codec 3lc; nothing for others.
[[nodiscard]] GW_PRIVATE_EXPORT std::optional<ThreeLcParameters> three_lc_parameters(
    const Codec& codec);

}  // namespace gradwire
