#pragma once

// The values of a least magnitude, element by element.

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "stages/element.h"

namespace gradwire {

// The trit of a value that is sent if its magnitude reaches t.
GW_HOST_DEVICE inline int reached_trit(float b, float t) {
  if (!reaches(b, t)) return 0;
  return b < 0.0f ? -1 : 1;
}

// What those that are sent decode to: their mean magnitude; 0 where there is none.
GW_HOST_DEVICE inline float mean_reached(double sum, uint64_t count) {
  return count == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(count));
}

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
