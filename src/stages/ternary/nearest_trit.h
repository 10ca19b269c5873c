#pragma once

// Ternary quantization to the nearest value (3LC, section 3.1), one element.

#include <cfloat>
#include <cstdint>

#include "base/host_device.h"
#include "stages/element/float_bits.h"

namespace gradwire {

// 3LC's multiplier m = min(sparsity * max|b|, FLT_MAX), from the finite result of an absmax.
GW_HOST_DEVICE inline float ternary_multiplier(uint32_t absmax_bits, float sparsity) {
  const float m = sparsity * float_of(absmax_bits);
  return m > FLT_MAX ? FLT_MAX : m;
}

// The trit of b: +1 above h, -1 below -h, else 0 (also for ties and NaN). h = m / 2 (3LC, section
// 3.1).
GW_HOST_DEVICE inline int ternary_trit(float b, float h) { return (b > h) - (b < -h); }

// The residual of b, which the next step adds to its input.
GW_HOST_DEVICE inline float ternary_residual(float b, int trit, float m) {
  return trit == 0 ? b : b - static_cast<float>(trit) * m;
}

}  // namespace gradwire
