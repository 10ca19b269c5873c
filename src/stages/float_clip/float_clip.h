#pragma once

// INCEPTIONN's floats (Li et al., MICRO 2018): a value below 1 keeps only the bits that an error
// bound asks for. Values go in bursts of eight. The functions here handle one value or one burst.
//
// A burst is a u16 of eight tags of 2 bits, the first value's lowest, then the values' codes in
// order, each of 0, 1, 2 or 4 bytes as its tag says. `fixed` is a value below 1 as sign and
// magnitude: the sign in bit 23, the magnitude in the bits below, in units of 2^-23, cut off.

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "stages/element/float_bits.h"

namespace gradwire {

inline constexpr size_t kBurstValues = 8;
inline constexpr size_t kBurstTagBytes = 2;
inline constexpr size_t kMaxBurstSize = kBurstTagBytes + kBurstValues * sizeof(float);

// Tags: nothing (+0), the upper 8 or 16 bits of `fixed`, all bits of the float.
inline constexpr uint32_t kClipNone = 0;
inline constexpr uint32_t kClip8 = 1;
inline constexpr uint32_t kClip16 = 2;
inline constexpr uint32_t kClip32 = 3;

inline constexpr uint32_t kOneBits = 0x3f800000u;  // 1.0f
inline constexpr float kFixedUnit = 0x1p-23f;
inline constexpr uint32_t kFixedSign = 1u << 23;

// The limits that the tag of a value depends on.
struct FloatClip {
  uint32_t smallest;  // values with smaller magnitude bits are not sent
  uint32_t wide;      // values with these magnitude bits or more take 16 bits, not 8
  uint32_t cut;       // bits of `fixed` that 8 bits may not cut off
};

enum class ClipMode : uint8_t {
  kPaper,   // 8 bits in the lower half of the exponents: errors up to 2^-7
  kStrict,  // 8 bits there only where the error stays below the bound, else 16
};

// For an error bound of 2^-bound, bound = 1..10.
GW_HOST_DEVICE constexpr FloatClip float_clip(int bound, ClipMode mode) {
  const int least = 127 - bound;
  const uint32_t below_bound = (1u << (23 - bound)) - 1;
  return {.smallest = static_cast<uint32_t>(least) << 23,
          .wide = static_cast<uint32_t>(least + (bound + 1) / 2) << 23,
          .cut = mode == ClipMode::kStrict ? 0xffffu & ~below_bound : 0u};
}

// `fixed` of |x| < 1; 0 (with the sign) for denormals.
GW_HOST_DEVICE inline uint32_t fixed_of(float x) {
  const uint32_t shift = 127 - (magnitude_bits(x) >> 23);
  const uint32_t significand = (bits_of(x) & 0x7fffffu) | 0x800000u;
  return (bits_of(x) >> 31 << 23) | (shift < 24 ? significand >> shift : 0u);
}

GW_HOST_DEVICE inline float float_of_fixed(uint32_t fixed) {
  const float magnitude = static_cast<float>(fixed & (kFixedSign - 1)) * kFixedUnit;
  return float_of(bits_of(magnitude) | (fixed & kFixedSign) << 8);
}

GW_HOST_DEVICE inline uint32_t clip_tag(float x, const FloatClip& clip) {
  const uint32_t magnitude = magnitude_bits(x);
  if (magnitude >= kOneBits) return kClip32;
  if (magnitude < clip.smallest) return kClipNone;
  return magnitude >= clip.wide || (fixed_of(x) & clip.cut) != 0 ? kClip16 : kClip8;
}

GW_HOST_DEVICE constexpr uint32_t clip_size(uint32_t tag) { return tag == kClip32 ? 4 : tag; }

// The code of x, in the low clip_size(tag) bytes.
GW_HOST_DEVICE inline uint32_t clip_code(float x, uint32_t tag) {
  switch (tag) {
    case kClip8:
      return fixed_of(x) >> 16;
    case kClip16:
      return fixed_of(x) >> 8;
    case kClip32:
      return bits_of(x);
    default:
      return 0;
  }
}

// The value of a code: -0 for a sign without magnitude.
GW_HOST_DEVICE inline float clip_value(uint32_t tag, uint32_t code) {
  switch (tag) {
    case kClip8:
      return float_of_fixed(code << 16);
    case kClip16:
      return float_of_fixed(code << 8);
    case kClip32:
      return float_of(code);
    default:
      return 0.0f;
  }
}

// Bytes of the codes of eight tags. All tags are summed at once, two of them in four bits.
GW_HOST_DEVICE constexpr uint32_t clip_codes_size(uint32_t tags) {
  const uint32_t even = tags & 0x3333u;
  const uint32_t odd = tags >> 2 & 0x3333u;
  // 0, 1, 2, 3 become 0, 1, 2, 4.
  uint32_t sizes = even + (even & even >> 1 & 0x1111u) + odd + (odd & odd >> 1 & 0x1111u);
  sizes = (sizes & 0x0f0fu) + (sizes >> 4 & 0x0f0fu);
  return (sizes + (sizes >> 8)) & 0xffu;
}

// Writes the burst of n = 1..8 values; absent ones have the tag 0. Returns its size.
GW_HOST_DEVICE inline size_t clip_encode_burst(const float* x, size_t n, const FloatClip& clip,
                                               uint8_t* out) {
  uint32_t tags = 0;
  size_t size = kBurstTagBytes;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t tag = clip_tag(x[i], clip);
    uint32_t code = clip_code(x[i], tag);
    tags |= tag << 2 * i;
    for (uint32_t byte = 0; byte < clip_size(tag); ++byte, code >>= 8) {
      out[size++] = static_cast<uint8_t>(code);
    }
  }
  out[0] = static_cast<uint8_t>(tags);
  out[1] = static_cast<uint8_t>(tags >> 8);
  return size;
}

// Reads the burst of n = 1..8 values at the front of `room` bytes. Returns its size, or 0 if the
// burst is longer than `room` or an absent value has a tag.
GW_HOST_DEVICE inline size_t clip_decode_burst(const uint8_t* burst, size_t room, size_t n,
                                               float* values) {
  if (room < kBurstTagBytes) return 0;
  const uint32_t tags = burst[0] | static_cast<uint32_t>(burst[1]) << 8;
  if (kBurstTagBytes + clip_codes_size(tags) > room || tags >> 2 * n != 0) return 0;
  size_t size = kBurstTagBytes;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t tag = tags >> 2 * i & 3u;
    uint32_t code = 0;
    for (uint32_t byte = 0; byte < clip_size(tag); ++byte) {
      code |= static_cast<uint32_t>(burst[size++]) << 8 * byte;
    }
    values[i] = clip_value(tag, code);
  }
  return size;
}

}  // namespace gradwire
