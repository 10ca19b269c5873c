#pragma once

#include <cstdint>
#include <optional>

#include "base/private_export.h"
#include "codecs/ternary.h"
#include "gradwire/codec.h"

namespace gradwire {

// What an exchange that shares scales (TernGrad, section 3) must know of its codec.
struct TernGradParameters {
  float clip = 2.5f;  // times the standard deviation; 0: none. The encoder's business alone
  TernaryCoder coder = TernaryCoder::kTwoBit;
  uint32_t bucket = 0;  // values that share a scale, a multiple of 320; 0: the whole segment

  [[nodiscard]] TernaryShape shape(uint64_t n) const { return {n, coder, bucket}; }
};

// Nothing where the codec is another one.
[[nodiscard]] GW_PRIVATE_EXPORT std::optional<TernGradParameters> terngrad_parameters(
    const Codec& codec);

}  // namespace gradwire
