#pragma once

// From gaps in Golomb-Rice code to trits (spec/format.md, Coder rice). Any bytes are safe.

#include <cstdint>

#include "cuda/ternary_code.cuh"
#include "stages/rice.h"

namespace gradwire::cuda {

// Bits of coded gaps, the first the lowest; 64 of them at hand.
struct GapBits {
  const uint8_t* bytes;
  uint32_t total;  // bits
  uint32_t at = 0;

  // The next 32 bits, zeros behind the end.
  __device__ uint32_t peek() const {
    const uint32_t first = at / 8;
    uint64_t word = 0;
    for (uint32_t i = 0; i < 5; ++i) {
      if (8 * (first + i) < total) word |= static_cast<uint64_t>(bytes[first + i]) << 8 * i;
    }
    return static_cast<uint32_t>(word >> at % 8);
  }
  __device__ uint32_t left() const { return total - at; }
  // Only padding is left.
  __device__ bool ended() const { return left() < kRicePadding && peek() == 0; }
};

// One thread reads a chunk's gaps, as each code begins where the one before ends. false: the bytes
// stand for no n trits. `trits` is 0 before.
__device__ inline bool read_gaps(const uint8_t* bytes, uint32_t size, uint32_t n,
                                 TritWords& trits) {
  GapBits reader{bytes, 8 * size};
  uint32_t next = 0;
  while (!reader.ended()) {
    if (reader.left() < kRiceHeadBits) return false;
    const uint32_t k = reader.peek() & (kRiceChoices - 1);
    reader.at += kRiceHeadBits;
    for (int i = 0; i < kRiceGroup && (i == 0 || !reader.ended()); ++i) {
      const uint32_t bits = reader.peek();
      const int zeros = bits == 0 ? kRiceEscape : __ffs(static_cast<int>(bits)) - 1;
      const bool escaped = zeros >= kRiceEscape;
      const uint32_t length = escaped ? kRiceLongestCode : static_cast<uint32_t>(zeros) + 2 + k;
      if (reader.left() < length) return false;
      const uint32_t at_sign = escaped ? kRiceEscape : static_cast<uint32_t>(zeros) + 1;
      const uint32_t sign = bits >> at_sign & 1;
      const uint32_t rest = bits >> at_sign >> 1;
      const uint32_t gap =
          escaped ? rest & 0xffffu : (static_cast<uint32_t>(zeros) << k) + (rest & ((1u << k) - 1));
      if (gap >= n - next) return false;
      const uint32_t at = next + gap;
      (sign != 0 ? trits.minus : trits.plus)[at / 32] |= 1u << at % 32;
      next = at + 1;
      reader.at += length;
    }
  }
  return true;
}

}  // namespace gradwire::cuda
