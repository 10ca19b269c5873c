#pragma once

#include <cstdint>

namespace gradwire {

struct OneBitParameters {
  uint32_t group_size = 0;  // values that share two means, a multiple of 8; 0: the whole segment
};

}  // namespace gradwire
