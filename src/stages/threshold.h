#pragma once

// The values of a least magnitude, element by element.

#include <cstddef>
#include <cstdint>

#include "stages/element.h"

namespace gradwire {

// Kernels::take_large.
template <class Residual>
size_t take_each_large(const float* x, Residual residual, size_t n, float t, uint64_t* mask,
                       float* out) {
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
}

}  // namespace gradwire
