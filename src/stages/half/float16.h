#pragma once

// One IEEE binary16 to and from float32.

#include <cstdint>

#include "base/host_device.h"
#include "stages/element/float_bits.h"

namespace gradwire {

// Between IEEE binary16 and binary32 the exponents differ by 112. The smallest normal f16 is 2^-14.
// Values of 65536 and more become infinite even before rounding.
inline constexpr int32_t kF16Rebias = 112 << 23;
inline constexpr int32_t kF16SmallestNormal = 113 << 23;
inline constexpr int32_t kF16Overflow = 143 << 23;
// 0.5f. Its last bit is worth 2^-24, as the last bit of a denormal f16 is, so adding 0.5 rounds a
// small value in the right place.
inline constexpr int32_t kF16DenormalMagic = 126 << 23;

GW_HOST_DEVICE inline float widen_f16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
  uint32_t bits = magnitude + kF16Rebias;
  if (magnitude >= 0x7c00u << 13) {
    bits += kF16Rebias;
  } else if (magnitude < 0x400u << 13) {
    bits = bits_of(float_of(magnitude + kF16SmallestNormal) - float_of(kF16SmallestNormal));
  }
  return float_of(bits | sign);
}

// A float32 with these magnitude bits or more (65520) rounds to an infinite f16.
inline constexpr uint32_t kF16RoundsToInfinity = 0x477ff000u;

// Rounds half to even, to infinity for 65520 and more; a NaN becomes the quiet NaN 0x7e00 with its
// sign.
GW_HOST_DEVICE inline uint16_t narrow_f16(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u;
  const uint32_t magnitude = magnitude_bits(x);
  uint32_t half = 0;
  if (magnitude >= kF16Overflow) {
    half = magnitude > kNonFiniteBits ? 0x7e00u : 0x7c00u;
  } else if (magnitude < kF16SmallestNormal) {
    half = bits_of(float_of(magnitude) + float_of(kF16DenormalMagic)) - kF16DenormalMagic;
  } else {
    half = (magnitude + (0xfffu - kF16Rebias) + (magnitude >> 13 & 1u)) >> 13;
  }
  return static_cast<uint16_t>(half | sign);
}

}  // namespace gradwire
