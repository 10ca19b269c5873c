#pragma once

// The scalar kernels of signs. Contracts: stages/kernels.h.

#include <cstddef>
#include <cstdint>

#include "stages/residual.h"
#include "stages/signs.h"

namespace gradwire::scalar {

template <class Residual>
void add_each_sign(const float* x, Residual residual, size_t n, SignLanes& lanes) {
  for (size_t i = 0; i < n; ++i) lanes.add(i, residual.add(x[i], i));
}

inline void add_sign_sums(const float* x, size_t n, SignLanes& lanes) {
  add_each_sign(x, NoResidual(), n, lanes);
}

inline void add_sign_sums_f32(const float* x, const float* r, size_t n, SignLanes& lanes) {
  add_each_sign(x, ResidualOf(r), n, lanes);
}

inline void add_sign_sums_bf16(const float* x, const uint16_t* r, size_t n, SignLanes& lanes) {
  add_each_sign(x, ResidualOf(r), n, lanes);
}

inline void pack_signs(const float* x, size_t n, uint8_t* bits) {
  pack_each_sign(x, NoResidual(), n, {}, bits);
}

inline void pack_signs_f32(const float* x, float* r, size_t n, SignMeans means, uint8_t* bits) {
  pack_each_sign(x, ResidualOf(r), n, means, bits);
}

inline void pack_signs_bf16(const float* x, uint16_t* r, size_t n, SignMeans means, uint8_t* bits) {
  pack_each_sign(x, ResidualOf(r), n, means, bits);
}

// Calls put(value index, is below 0) for n values; false unless the padding is 0.
template <typename Put>
bool unpack_signs_each(const uint8_t* bits, size_t n, Put put) {
  for (size_t i = 0; i < n; ++i) put(i, (bits[i / 8] >> i % 8 & 1) != 0);
  return n % 8 == 0 || bits[n / 8] >> n % 8 == 0;
}

inline bool unpack_signs(const uint8_t* bits, size_t n, SignMeans means, float* out) {
  return unpack_signs_each(bits, n, [=](size_t i, bool below) { out[i] = means.of(below); });
}

inline bool unpack_signs_add(const uint8_t* bits, size_t n, SignMeans means, float* out) {
  return unpack_signs_each(bits, n, [=](size_t i, bool below) { out[i] += means.of(below); });
}

}  // namespace gradwire::scalar
