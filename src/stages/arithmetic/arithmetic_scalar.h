#pragma once

// The scalar kernels of arithmetic on spans. Contracts: stages/kernels.def.

#include <cstddef>

#include "stages/element/float_bits.h"

namespace gradwire::scalar {

inline void sum(const float* a, const float* b, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = a[i] + load_unaligned(b + i);
}

inline void subtract(const float* a, const float* b, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = a[i] - b[i];
}

inline void divide(float* x, size_t n, float divisor) {
  for (size_t i = 0; i < n; ++i) x[i] /= divisor;
}

}  // namespace gradwire::scalar
