#pragma once

#include <cstdint>

#include "codecs/ternary_coder.h"

namespace gradwire {

struct QgdParameters {
  TernaryCoder coder = TernaryCoder::kRice;
  // One scale for the whole segment. ThreeLcParameters has a field of this name.
  static constexpr uint32_t group_size = 0;  // NOLINT(readability-identifier-naming)
};

}  // namespace gradwire
