#pragma once

#include <cstdint>

#include "codecs/ternary_coder.h"

namespace gradwire {

// What an exchange that shares scales (TernGrad, section 3) must know of its codec, too.
struct TernGradParameters {
  float clip = 2.5f;  // times the standard deviation; 0: none. The encoder's business alone
  TernaryCoder coder = TernaryCoder::kTwoBit;
  uint32_t group_size = 0;  // values that share a scale, a multiple of 320; 0: the whole segment
};

}  // namespace gradwire
