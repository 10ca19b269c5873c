#pragma once

// Elias omega codes (QSGD, section 3.1; Elias 1975), and how levels are written with them. Rules as
// in stages/element/float_bits.h.
//
// Bits fill the bytes from the highest to the lowest, so that a code reads as it is printed:
// 1: 0, 2: 100, 3: 110, 4: 101000, 8: 1110000, 16: 10100100000.

#include <cstdint>

#include "base/host_device.h"
#include "stages/levels/levels.h"

namespace gradwire {

// `length` bits; the last bit is the lowest.
struct BitCode {
  uint64_t bits;
  int length;
};

GW_HOST_DEVICE constexpr int bit_length(uint32_t k) {
  int length = 0;
  while (k > 0) ++length, k >>= 1;
  return length;
}

GW_HOST_DEVICE constexpr BitCode concatenate(BitCode first, BitCode last) {
  return {first.bits << last.length | last.bits, first.length + last.length};
}

// A code is a sequence of numbers in binary, each from its highest bit (a one) on. Each number is
// one less than the length of the next; the last number is k. A zero bit ends the code.
GW_HOST_DEVICE constexpr BitCode elias_code(uint32_t k) {
  BitCode code = {0, 1};
  while (k > 1) {
    const int length = bit_length(k);
    code = concatenate({k, length}, code);
    k = static_cast<uint32_t>(length) - 1;
  }
  return code;
}

// Values from this one on are not read: no chunk needs them.
inline constexpr uint32_t kEliasLimit = 65536;

struct EliasNumber {
  uint32_t value;
  int length;  // of its code; 0: the value is kEliasLimit or more
};

// The number at the front of `window`, whose highest bit comes first. Looks at no more than 23
// bits.
GW_HOST_DEVICE constexpr EliasNumber elias_read(uint64_t window) {
  uint32_t value = 1;
  int length = 0;
  while (window >> 63 != 0) {
    if (value >= 16) return {0, 0};
    const int group = static_cast<int>(value) + 1;
    value = static_cast<uint32_t>(window >> (64 - group));
    window <<= group;
    length += group;
  }
  return {value, length + 1};
}

// Sparse: for each level that is not 0, its distance from the previous such level (for the first,
// from the place before all levels), then this code. At the end comes the distance to the place
// after the last level.
GW_HOST_DEVICE constexpr BitCode sparse_level_code(int32_t level) {
  const uint64_t sign = level < 0 ? 1 : 0;
  return concatenate({sign, 1}, elias_code(static_cast<uint32_t>(level < 0 ? -level : level)));
}

// Dense: this code for each level.
GW_HOST_DEVICE constexpr BitCode dense_level_code(int32_t level) {
  const BitCode magnitude = elias_code(static_cast<uint32_t>(level < 0 ? -level : level) + 1);
  if (level == 0) return magnitude;
  return concatenate(magnitude, {level < 0 ? uint64_t{1} : uint64_t{0}, 1});
}

// The level whose code is at the front of `window`; the distance of a sparse level is read before.
// length 0: the number in the code is kEliasLimit or more.
struct EliasLevel {
  int32_t level;
  int length;
};

GW_HOST_DEVICE constexpr EliasLevel sparse_level_read(uint64_t window) {
  const EliasNumber magnitude = elias_read(window << 1);
  const auto level = static_cast<int32_t>(magnitude.value);
  return {window >> 63 != 0 ? -level : level, magnitude.length == 0 ? 0 : 1 + magnitude.length};
}
GW_HOST_DEVICE constexpr EliasLevel dense_level_read(uint64_t window) {
  const EliasNumber number = elias_read(window);
  const auto level = static_cast<int32_t>(number.value) - 1;
  if (level <= 0) return {level, number.length};
  return {window << number.length >> 63 != 0 ? -level : level, number.length + 1};
}

// The most bytes that n levels up to s take: the bytes of n levels s, because code lengths never
// fall, and because a gap saves at least as many bits as its longer distance costs.
GW_HOST_DEVICE constexpr uint64_t sparse_levels_room(uint64_t n, int32_t s) {
  return (n * static_cast<uint64_t>(1 + sparse_level_code(s).length) + 1 + 7) / 8;
}
GW_HOST_DEVICE constexpr uint64_t dense_levels_room(uint64_t n, int32_t s) {
  return (n * static_cast<uint64_t>(dense_level_code(s).length) + 7) / 8;
}

// The fewest bytes: those of n levels 0. sparse_levels_least needs n < kEliasLimit - 1.
GW_HOST_DEVICE constexpr uint64_t sparse_levels_least(uint64_t n) {
  return static_cast<uint64_t>(elias_code(static_cast<uint32_t>(n) + 1).length + 7) / 8;
}
GW_HOST_DEVICE constexpr uint64_t dense_levels_least(uint64_t n) { return (n + 7) / 8; }

}  // namespace gradwire
