#pragma once

// Two bits a trit.

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "stages/element/float_bits.h"
#include "stages/trits/trit_bits.h"

namespace gradwire {

// Two bits a trit: 0, 1 for +1, 2 for -1; the first of four in the lowest bits of a byte.
inline constexpr int kTwoBitTrits = 4;

GW_HOST_DEVICE constexpr uint64_t two_bit_size(uint64_t n) {
  return n / kTwoBitTrits + (n % kTwoBitTrits != 0 ? 1 : 0);
}

// The trit of a code 0 to 2.
GW_HOST_DEVICE constexpr int two_bit_trit(int code) { return (code & 1) - (code >> 1); }

// Bit i goes to bit 2 i.
GW_HOST_DEVICE constexpr uint64_t spread_bits(uint32_t bits) {
  uint64_t spread = bits;
  spread = (spread | spread << 16) & 0x0000ffff0000ffffu;
  spread = (spread | spread << 8) & 0x00ff00ff00ff00ffu;
  spread = (spread | spread << 4) & 0x0f0f0f0f0f0f0f0fu;
  spread = (spread | spread << 2) & 0x3333333333333333u;
  return (spread | spread << 1) & 0x5555555555555555u;
}

// n trits to two_bit_size(n) bytes.
inline void pack_two_bit_words(const uint64_t* plus, const uint64_t* minus, size_t n,
                               uint8_t* packed) {
  constexpr size_t kHalfBytes = kWordBits / 2 / kTwoBitTrits;
  const size_t size = two_bit_size(n);
  for (size_t at = 0; at < size; at += kHalfBytes) {
    const size_t word = at / (2 * kHalfBytes);
    const auto shift = at % (2 * kHalfBytes) == 0 ? 0 : kWordBits / 2;
    const uint64_t codes = spread_bits(static_cast<uint32_t>(plus[word] >> shift)) |
                           spread_bits(static_cast<uint32_t>(minus[word] >> shift)) << 1;
    if (size - at >= kHalfBytes) {
      store_unaligned(reinterpret_cast<uint64_t*>(packed + at), codes);
      continue;
    }
    for (size_t i = at; i < size; ++i) packed[i] = static_cast<uint8_t>(codes >> 8 * (i - at));
  }
}

}  // namespace gradwire
