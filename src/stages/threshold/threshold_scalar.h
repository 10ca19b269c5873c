#pragma once

// The scalar kernels of values that reach a threshold. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stages/element/residual_access.h"
#include "stages/threshold/reach.h"

namespace gradwire::scalar {

inline void threshold_bits(const float* x, size_t n, float t, uint64_t* mask) {
  std::fill(mask, mask + (n + 63) / 64, 0);
  for (size_t i = 0; i < n; ++i) mask[i / 64] |= uint64_t{reaches(x[i], t)} << i % 64;
}

inline size_t take_large(const float* x, ResidualValues r, size_t n, float t, uint64_t* mask,
                         float* out) {
  return with_residual(r, [=](auto residual) {
    size_t count = 0;
    for (size_t i = 0; i < n; ++i) {
      const float b = residual.add(x[i], i);
      const bool large = reaches(b, t);
      if (i % 64 == 0) mask[i / 64] = 0;
      mask[i / 64] |= uint64_t{large} << i % 64;
      if (large) out[count++] = b;
      residual.set(large ? 0.0f : b, i);
    }
    return count;
  });
}

}  // namespace gradwire::scalar
