#pragma once

// Trits as two bit arrays: bit i % 64 of word i / 64 of `plus` is set where value i is +1, and
// of `minus` where it is -1, never both. The bits after the last value are 0.

#include <cstddef>
#include <cstdint>

#include "stages/trits/trit.h"

namespace gradwire {

inline constexpr size_t kWordBits = 64;

constexpr size_t trit_words(size_t n) { return n / kWordBits + (n % kWordBits != 0 ? 1 : 0); }

// Sets trit i, which is not 0, in words that are 0 there.
GW_HOST_DEVICE inline void set_trit(uint64_t* plus, uint64_t* minus, size_t i, int trit) {
  uint64_t* words = trit > 0 ? plus : minus;
  words[i / kWordBits] |= uint64_t{1} << i % kWordBits;
}

// The weight that five bits add to a packed byte; the first bit is the lowest.
GW_HOST_DEVICE constexpr int weight_of_five(uint32_t bits) {
  int weight = 0;
  for (int place = 0; place < kTritsPerByte; ++place) {
    weight += static_cast<int>(bits >> place & 1) * trit_weight(place);
  }
  return weight;
}

struct WeightsOfFive {
  uint8_t of[32] = {};
  constexpr WeightsOfFive() {
    for (uint32_t bits = 0; bits < 32; ++bits) {
      of[bits] = static_cast<uint8_t>(weight_of_five(bits));
    }
  }
};
inline constexpr WeightsOfFive kWeightsOfFive;

// The five bits from bit `at` on; 0 after the last word.
inline size_t five_bits(const uint64_t* words, size_t at, size_t count) {
  const size_t word = at / kWordBits;
  const size_t shift = at % kWordBits;
  uint64_t bits = words[word] >> shift;
  if (shift > kWordBits - kTritsPerByte && word + 1 < count) {
    bits |= words[word + 1] << (kWordBits - shift);
  }
  return bits & 31;
}

// Packs five trits to a byte, as Kernels::pack_trits does.
inline void pack_trit_bits(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* packed) {
  const size_t words = trit_words(n);
  for (size_t at = 0; at < n; at += kTritsPerByte) {
    *packed++ = static_cast<uint8_t>(kZeroByte + kWeightsOfFive.of[five_bits(plus, at, words)] -
                                     kWeightsOfFive.of[five_bits(minus, at, words)]);
  }
}

// Undoes pack_trit_bits; the words must be 0. Returns false as Kernels::unpack does.
inline bool unpack_trit_bits(const uint8_t* packed, size_t n, uint64_t* plus, uint64_t* minus) {
  for (size_t i = 0; i < packed_size(n); ++i) {
    if (packed[i] > kLargestPackedByte) return false;
    if (packed[i] == kZeroByte) continue;
    for (int place = 0; place < kTritsPerByte; ++place) {
      const int trit = trit_at(packed[i], place);
      const size_t at = i * kTritsPerByte + static_cast<size_t>(place);
      if (trit == 0) continue;
      if (at >= n) return false;
      set_trit(plus, minus, at, trit);
    }
  }
  return true;
}

}  // namespace gradwire
