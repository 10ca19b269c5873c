#pragma once

#include <cstdint>

#include "codecs/ternary_coder.h"

namespace gradwire {

struct ThreeLcParameters {
  float sparsity = 1.0f;  // s, in [1, 2); only the encoder uses it
  TernaryCoder coder = TernaryCoder::kZeroRun;
  uint32_t group_size = 0;  // values that share a scale, a multiple of 5; 0: the whole segment
};

}  // namespace gradwire
