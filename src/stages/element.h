#pragma once

// The arithmetic of one element. These functions are the definition of every stage: the scalar
// kernels loop over them, CUDA kernels call them, and SIMD code must give the same bits.
// Compile with -ffp-contract=off (nvcc: --fmad=false) and without flush-to-zero.

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "base/host_device.h"

namespace gradwire {

// Sign-cleared bits from here on up are infinities and NaNs.
inline constexpr uint32_t kNonFiniteBits = 0x7f800000u;
// Five trits make a byte: 81a + 27b + 9c + 3d + e of trit + 1. Larger bytes are no trits.
inline constexpr int kTritsPerByte = 5;
inline constexpr uint8_t kZeroByte = 121;
inline constexpr uint8_t kLargestPackedByte = 242;
// Zero runs: kRunBase + (k - kShortestRun) stands for k bytes kZeroByte, k = 2..14.
inline constexpr uint8_t kRunBase = 243;
inline constexpr int kShortestRun = 2;
inline constexpr int kLongestRun = 14;

// What comes from a payload or goes there lies at any address.
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

// 3LC's multiplier m = min(sparsity * max|b|, FLT_MAX), from the finite result of an absmax.
GW_HOST_DEVICE inline float ternary_multiplier(uint32_t absmax_bits, float sparsity) {
  const float m = sparsity * float_of(absmax_bits);
  return m > FLT_MAX ? FLT_MAX : m;
}

// Is |x| at least t > 0? NaN is not.
GW_HOST_DEVICE inline bool reaches(float x, float t) { return x >= t || x <= -t; }

// The trit of b: +1 above h, -1 below -h, else 0 (so are ties and NaN). h = m / 2 (3LC,
// section 3.1).
GW_HOST_DEVICE inline int ternary_trit(float b, float h) { return (b > h) - (b < -h); }

// The value that a trit decodes to; +0 where it is 0.
GW_HOST_DEVICE inline float ternary_value(int trit, float m) {
  return trit == 0 ? 0.0f : static_cast<float>(trit) * m;
}

// What b leaves for the next step.
GW_HOST_DEVICE inline float ternary_residual(float b, int trit, float m) {
  return trit == 0 ? b : b - static_cast<float>(trit) * m;
}

// `sum` with a trit added; the same bits where the trit is 0.
GW_HOST_DEVICE inline float ternary_accumulate(float sum, int trit, float m) {
  return trit == 0 ? sum : sum + static_cast<float>(trit) * m;
}

// An integer sum with a trit added; at most 127 trits make a sum.
GW_HOST_DEVICE inline int8_t trit_sum(int8_t sum, int trit) {
  return static_cast<int8_t>(sum + trit);
}

// Weight of the trit at place 0..4 of a packed byte: 81, 27, 9, 3, 1.
GW_HOST_DEVICE constexpr int trit_weight(int place) {
  int weight = 1;
  for (int i = place; i < kTritsPerByte - 1; ++i) weight *= 3;
  return weight;
}

// The trit at place 0..4 of a packed byte <= 242: a digit in base 3 of packed / 243. 270 / 2^16 is
// 1 / 243 and 0.12 % more, too little to change a digit. No division, which would cost a GPU more
// than the memory does.
GW_HOST_DEVICE constexpr int trit_at(uint32_t packed, int place) {
  constexpr uint64_t kPowersOf3 = 0x511b090301;  // 1, 3, 9, 27, 81
  const auto power = static_cast<uint32_t>(kPowersOf3 >> 8 * place & 0xff);
  const uint32_t fraction = packed * (270 * power) & 0xffff;  // behind the digits in front
  return static_cast<int>(fraction * 3 >> 16) - 1;
}

// Packed bytes that one code of the zero-run coding stands for.
GW_HOST_DEVICE constexpr int run_length_of(uint8_t code) {
  return code < kRunBase ? 1 : code - kRunBase + kShortestRun;
}

// Bytes that n values are packed into.
GW_HOST_DEVICE constexpr uint64_t packed_size(uint64_t n) {
  return n / kTritsPerByte + (n % kTritsPerByte != 0 ? 1 : 0);
}

// The code of a zero run of k = 1..14 bytes; a lone zero byte stays.
GW_HOST_DEVICE constexpr uint8_t run_code(int k) {
  return k < kShortestRun ? kZeroByte : static_cast<uint8_t>(kRunBase + (k - kShortestRun));
}

// bfloat16 is the upper half of a float.
GW_HOST_DEVICE inline float widen_bf16(uint16_t x) {
  return float_of(static_cast<uint32_t>(x) << 16);
}

// From these magnitude bits on, a float32 rounds to an infinite bfloat16.
inline constexpr uint32_t kRoundsToInfinity = 0x7f7f8000u;

// Rounds half to even; a NaN becomes the quiet NaN 0x7fc0 with its sign.
GW_HOST_DEVICE inline uint16_t narrow_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if (magnitude_bits(x) > kNonFiniteBits) {
    return static_cast<uint16_t>((bits >> 16 & 0x8000u) | 0x7fc0u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The steps between IEEE binary16 and binary32. Exponents differ by 112; the smallest normal f16 is
// 2^-14; from 65536 on (before rounding) there is only infinity.
inline constexpr int32_t kF16Rebias = 112 << 23;
inline constexpr int32_t kF16SmallestNormal = 113 << 23;
inline constexpr int32_t kF16Overflow = 143 << 23;
// 0.5f: its last bit is worth 2^-24, as is that of a denormal f16, so that adding it rounds a small
// value in the right place.
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

// From these magnitude bits on, a float32 rounds to an infinite f16: 65520.
inline constexpr uint32_t kF16RoundsToInfinity = 0x477ff000u;

// Rounds half to even, to infinity from 65520 on; a NaN becomes the quiet NaN 0x7e00 with its sign.
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

// Sum, sum of squares and the largest magnitude. Doubles in 16 lanes, so that the order of the
// additions, and with it every bit of the result, is the same for any vector length: value i goes
// to lane i % 16, and in the end lane l takes lane l + 8, then l + 4, l + 2 and l + 1.
struct Moments {
  double sum = 0;
  double squares = 0;
  uint32_t largest = 0;  // bits of a magnitude, as Kernels::absmax
};

inline constexpr int kMomentLanes = 16;

struct MomentLanes {
  double sum[kMomentLanes] = {};
  double squares[kMomentLanes] = {};
  uint32_t largest = 0;

  GW_HOST_DEVICE void add(uint64_t i, float x) {
    const double wide = x;
    sum[i % kMomentLanes] += wide;
    squares[i % kMomentLanes] += wide * wide;
    if (magnitude_bits(x) > largest) largest = magnitude_bits(x);
  }

  GW_HOST_DEVICE Moments total() {
    for (int half = kMomentLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) {
        sum[lane] += sum[lane + half];
        squares[lane] += squares[lane + half];
      }
    }
    return {sum[0], squares[0], largest};
  }
};

}  // namespace gradwire
