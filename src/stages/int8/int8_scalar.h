#pragma once

// The scalar kernels of the codec int8. Contracts: stages/kernels.def.

#include <cstddef>
#include <cstdint>

#include "stages/element/output.h"
#include "stages/element/residual_access.h"
#include "stages/int8/int8_rounding.h"

namespace gradwire::scalar {

template <class Residual>
void quantize_each_int8(const float* x, Residual residual, size_t n, float unit, int8_t* q) {
  for (size_t i = 0; i < n; ++i) {
    const float b = residual.add(x[i], i);
    q[i] = gradwire::quantize_int8(b, unit);
    residual.set(b - int8_value(q[i], unit), i);
  }
}

// Puts the values of q[first] to q[n - 1]; false if one of them is -128.
template <class Output>
bool dequantize_each_int8(const int8_t* q, size_t first, size_t n, float unit, Output to) {
  bool valid = true;
  for (size_t i = first; i < n; ++i) {
    valid &= q[i] >= -kInt8Levels;
    to.put(int8_value(q[i], unit), i);
  }
  return valid;
}

inline void quantize_int8(const float* x, ResidualValues r, size_t n, float unit, int8_t* q) {
  with_residual(r, [=](auto residual) { quantize_each_int8(x, residual, n, unit, q); });
}

inline bool dequantize_int8(const int8_t* q, size_t n, float unit, float* out, DecodeMode mode) {
  return with_output(out, mode, [=](auto to) { return dequantize_each_int8(q, 0, n, unit, to); });
}

}  // namespace gradwire::scalar
