#pragma once

// One bfloat16 to and from float32.

#include <cstdint>

#include "base/host_device.h"
#include "stages/element/float_bits.h"

namespace gradwire {

// bfloat16 is the upper half of a float.
GW_HOST_DEVICE inline float widen_bf16(uint16_t x) {
  return float_of(static_cast<uint32_t>(x) << 16);
}

// A float32 with these magnitude bits or more rounds to an infinite bfloat16.
inline constexpr uint32_t kRoundsToInfinity = 0x7f7f8000u;

inline constexpr uint16_t kInfiniteBf16 = 0x7f80u;

// Rounds half to even; a NaN becomes the quiet NaN 0x7fc0 with its sign.
GW_HOST_DEVICE inline uint16_t narrow_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if (magnitude_bits(x) > kNonFiniteBits) {
    return static_cast<uint16_t>((bits >> 16 & 0x8000u) | 0x7fc0u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The same for residuals, which must stay finite: in place of an infinity, the largest bfloat16.
GW_HOST_DEVICE inline uint16_t narrow_bf16_finite(float x) {
  const uint16_t narrow = narrow_bf16(x);
  return (narrow & 0x7fffu) == kInfiniteBf16 ? static_cast<uint16_t>(narrow - 1) : narrow;
}

}  // namespace gradwire
