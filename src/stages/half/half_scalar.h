#pragma once

// The scalar kernels of 16-bit floats. Contracts: stages/kernels.def.

#include <cstddef>
#include <cstdint>

#include "stages/element/bfloat16.h"
#include "stages/element/float_bits.h"
#include "stages/element/output.h"
#include "stages/half/float16.h"

namespace gradwire::scalar {

inline void narrow_bf16(const float* x, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; ++i) store_unaligned(out + i, gradwire::narrow_bf16(x[i]));
}

inline void narrow_bf16_finite(const float* x, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; ++i) store_unaligned(out + i, gradwire::narrow_bf16_finite(x[i]));
}

inline void widen_bf16(const uint16_t* x, size_t n, float* out, DecodeMode mode) {
  with_output(out, mode, [=](auto to) {
    for (size_t i = 0; i < n; ++i) to.put(gradwire::widen_bf16(load_unaligned(x + i)), i);
  });
}

inline void narrow_f16(const float* x, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; ++i) store_unaligned(out + i, gradwire::narrow_f16(x[i]));
}

inline void widen_f16(const uint16_t* x, size_t n, float* out, DecodeMode mode) {
  with_output(out, mode, [=](auto to) {
    for (size_t i = 0; i < n; ++i) to.put(gradwire::widen_f16(load_unaligned(x + i)), i);
  });
}

}  // namespace gradwire::scalar
