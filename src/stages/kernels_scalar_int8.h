#pragma once

// The scalar kernels of the codec int8. Contracts: stages/kernels.h.

#include <cstddef>
#include <cstdint>

#include "stages/int8.h"
#include "stages/residual.h"

namespace gradwire::scalar {

inline void quantize_int8(const float* x, size_t n, float unit, int8_t* q) {
  quantize_each_int8(x, NoResidual(), n, unit, q);
}

inline void quantize_int8_f32(const float* x, float* r, size_t n, float unit, int8_t* q) {
  quantize_each_int8(x, ResidualOf(r), n, unit, q);
}

inline void quantize_int8_bf16(const float* x, uint16_t* r, size_t n, float unit, int8_t* q) {
  quantize_each_int8(x, ResidualOf(r), n, unit, q);
}

inline bool dequantize_int8(const int8_t* q, size_t n, float unit, float* out) {
  bool valid = true;
  for (size_t i = 0; i < n; ++i) {
    valid &= q[i] >= -kInt8Levels;
    out[i] = int8_value(q[i], unit);
  }
  return valid;
}

inline bool dequantize_int8_add(const int8_t* q, size_t n, float unit, float* out) {
  bool valid = true;
  for (size_t i = 0; i < n; ++i) {
    valid &= q[i] >= -kInt8Levels;
    out[i] += int8_value(q[i], unit);
  }
  return valid;
}

}  // namespace gradwire::scalar
