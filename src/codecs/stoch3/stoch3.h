#pragma once

#include <cstdint>

#include "codecs/ternary_coder.h"

namespace gradwire {

struct Stoch3Parameters {
  // TernGradParameters has a field of this name.
  static constexpr float clip = 0;  // NOLINT(readability-identifier-naming)
  TernaryCoder coder = TernaryCoder::kNone;
  uint32_t group_size = 0;  // values that share a scale, a multiple of 320; 0: the whole segment
};

}  // namespace gradwire
