#pragma once

// The scalar kernels of magnitudes. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stages/element/float_bits.h"
#include "stages/element/residual_access.h"
#include "stages/magnitude/moments.h"

namespace gradwire::scalar {

inline uint32_t absmax(const float* x, ResidualValues r, size_t n) {
  return with_residual(r, [=](auto residual) {
    uint32_t max = 0;
    for (size_t i = 0; i < n; ++i) max = std::max(max, magnitude_bits(residual.add(x[i], i)));
    return max;
  });
}

inline Moments moments(const float* x, size_t n) {
  MomentLanes sums;
  for (size_t i = 0; i < n; ++i) sums.add(i, x[i]);
  return sums.total();
}

}  // namespace gradwire::scalar
