#pragma once

// The scalar kernels of floats whose low bits are cut off. Contracts: stages/kernels.def.

#include <bit>
#include <cstddef>
#include <cstdint>

#include "stages/element/output.h"
#include "stages/truncation/truncation.h"

namespace gradwire::scalar {

// Values of these kernels' loops are at multiples of kLowFields, so that no byte of `low` is shared
// by two calls.
inline void truncate_encode(const float* x, size_t n, uint32_t low_bits, uint8_t* high,
                            uint8_t* low) {
  const size_t fields = low_bits == 2 ? kLowFields : 1;
  for (size_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<uint32_t>(x[i]);
    high[i] = static_cast<uint8_t>(bits >> 24);
    if (low_bits == 0) continue;
    const auto field = static_cast<uint8_t>(bits << 8 >> (32 - low_bits));
    uint8_t& byte = low[i / fields];
    byte = static_cast<uint8_t>((i % fields == 0 ? 0 : byte) | field << i % fields * low_bits);
  }
}

inline bool truncate_decode(const uint8_t* high, const uint8_t* low, size_t n, uint32_t low_bits,
                            float* out, DecodeMode mode) {
  const size_t fields = low_bits == 2 ? kLowFields : 1;
  with_output(out, mode, [=](auto to) {
    for (size_t i = 0; i < n; ++i) {
      uint32_t bits = uint32_t{high[i]} << 24;
      if (low_bits != 0) {
        const uint32_t field = low[i / fields] >> i % fields * low_bits & ((1u << low_bits) - 1);
        bits |= field << (24 - low_bits);
      }
      to.put(std::bit_cast<float>(bits), i);
    }
  });
  return n % fields == 0 || low[n / fields] >> n % fields * low_bits == 0;
}

}  // namespace gradwire::scalar
