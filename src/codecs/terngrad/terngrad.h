#pragma once

#include <cstdint>

#include "codecs/ternary_coder.h"

namespace gradwire {

// Exchanges that share scales (TernGrad, section 3) read these parameters, too.
struct TernGradParameters {
  float clip = 2.5f;  // times the standard deviation; 0: none. Only the encoder uses it
  TernaryCoder coder = TernaryCoder::kTwoBit;
  uint32_t group_size = 0;  // values that share a scale, a multiple of 320; 0: the whole segment
};

}  // namespace gradwire
