#pragma once

#include <cstdint>

namespace gradwire {

struct Int8Parameters {
  uint32_t group_size = 0;  // values that share a unit; 0: the whole segment
};

}  // namespace gradwire
