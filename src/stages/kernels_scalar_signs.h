#pragma once

// The scalar kernels of signs. Contracts: stages/kernels.h.

#include <cstddef>
#include <cstdint>

#include "stages/signs.h"

namespace gradwire::scalar {

inline void add_sign_sums(const float* b, size_t n, SignLanes& lanes) {
  for (size_t i = 0; i < n; ++i) lanes.add(i, b[i]);
}

inline void pack_signs(const float* b, size_t n, uint8_t* bits) {
  for (size_t i = 0; i < n; ++i) {
    if (i % 8 == 0) bits[i / 8] = 0;
    bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | (b[i] < 0.0f ? 1 : 0) << i % 8);
  }
}

// Calls put(value index, is below 0) for n values; false unless the padding is 0.
template <typename Put>
bool unpack_signs_each(const uint8_t* bits, size_t n, Put put) {
  for (size_t i = 0; i < n; ++i) put(i, (bits[i / 8] >> i % 8 & 1) != 0);
  return n % 8 == 0 || bits[n / 8] >> n % 8 == 0;
}

inline bool unpack_signs(const uint8_t* bits, size_t n, SignMeans means, float* out) {
  return unpack_signs_each(
      bits, n, [=](size_t i, bool below) { out[i] = below ? means.negative : means.positive; });
}

inline bool unpack_signs_add(const uint8_t* bits, size_t n, SignMeans means, float* out) {
  return unpack_signs_each(
      bits, n, [=](size_t i, bool below) { out[i] += below ? means.negative : means.positive; });
}

}  // namespace gradwire::scalar
