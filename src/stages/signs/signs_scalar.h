#pragma once

// The scalar kernels of signs. Contracts: stages/kernels.def.

#include <cstddef>
#include <cstdint>

#include "stages/element/output.h"
#include "stages/element/residual_access.h"
#include "stages/signs/signs.h"

namespace gradwire::scalar {

inline void add_sign_sums(const float* x, ResidualValues r, size_t n, SignLanes& lanes) {
  with_residual(r, [=, &lanes](auto residual) {
    for (size_t i = 0; i < n; ++i) lanes.add(i, residual.add(x[i], i));
  });
}

inline void pack_signs(const float* x, ResidualValues r, size_t n, SignMeans means, uint8_t* bits) {
  with_residual(r, [=](auto residual) {
    for (size_t i = 0; i < n; ++i) {
      const float b = residual.add(x[i], i);
      const bool below = b < 0.0f;
      if (i % 8 == 0) bits[i / 8] = 0;
      bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | (below ? 1 : 0) << i % 8);
      residual.set(b - means.of(below), i);
    }
  });
}

inline bool unpack_signs(const uint8_t* bits, size_t n, SignMeans means, float* out,
                         DecodeMode mode) {
  with_output(out, mode, [=](auto to) {
    for (size_t i = 0; i < n; ++i) to.put(means.of((bits[i / 8] >> i % 8 & 1) != 0), i);
  });
  return n % 8 == 0 || bits[n / 8] >> n % 8 == 0;
}

}  // namespace gradwire::scalar
