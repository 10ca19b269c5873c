#pragma once

#include <cstdint>

namespace gradwire {

// Values among which the largest are found. A chunk has a whole number of these groups.
inline constexpr uint64_t kTopk2bitGroup = 4096;

struct Topk2bitParameters {
  float density = 0.02f;  // share of the values that is sent; only the encoder uses it
};

}  // namespace gradwire
