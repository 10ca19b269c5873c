#pragma once

// The bits of one float32.
//
// The headers of the stages (stages/NAME/*.h) define the arithmetic of one element: the scalar
// kernels loop over these functions, CUDA kernels call them, and SIMD code must give the same bits.
// Compile with -ffp-contract=off (nvcc: --fmad=false) and without flush-to-zero.

#include <cstdint>
#include <cstring>

#include "base/host_device.h"

namespace gradwire {

// Sign-cleared bits of this value or more are infinities and NaNs.
inline constexpr uint32_t kNonFiniteBits = 0x7f800000u;

// Values in payloads lie at any address.
template <typename T>
GW_HOST_DEVICE inline T load_unaligned(const T* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
GW_HOST_DEVICE inline void store_unaligned(T* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

GW_HOST_DEVICE inline uint32_t bits_of(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

GW_HOST_DEVICE inline float float_of(uint32_t bits) {
  float x = 0.0f;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Bits of |x|. As unsigned integers they are ordered like |x|, with Inf and then NaN on top.
GW_HOST_DEVICE inline uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

}  // namespace gradwire
