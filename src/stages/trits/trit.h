#pragma once

// One trit: its value, its place among the five of a packed byte, its part in a sum.

#include <cstdint>

#include "base/host_device.h"

namespace gradwire {

// Five trits make a byte: 81a + 27b + 9c + 3d + e of trit + 1. Larger bytes hold no trits.
inline constexpr int kTritsPerByte = 5;
inline constexpr uint8_t kZeroByte = 121;
inline constexpr uint8_t kLargestPackedByte = 242;

// The value that a trit decodes to; +0 where it is 0.
GW_HOST_DEVICE inline float ternary_value(int trit, float m) {
  return trit == 0 ? 0.0f : static_cast<float>(trit) * m;
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

// The trit at place 0..4 of a packed byte <= 242: a digit in base 3 of packed / 243. 270 / 2^16
// exceeds 1 / 243 by 0.12 %, too little to change a digit. A division would cost a GPU more time
// than the memory takes.
GW_HOST_DEVICE constexpr int trit_at(uint32_t packed, int place) {
  constexpr uint64_t kPowersOf3 = 0x511b090301;  // 1, 3, 9, 27, 81
  const auto power = static_cast<uint32_t>(kPowersOf3 >> 8 * place & 0xff);
  const uint32_t fraction = packed * (270 * power) & 0xffff;  // without the digits before it
  return static_cast<int>(fraction * 3 >> 16) - 1;
}

// Bytes that n values are packed into.
GW_HOST_DEVICE constexpr uint64_t packed_size(uint64_t n) {
  return n / kTritsPerByte + (n % kTritsPerByte != 0 ? 1 : 0);
}

}  // namespace gradwire
