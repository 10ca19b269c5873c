#pragma once

// The scalar kernels of drawn trits and of two bits a trit. Contracts: stages/kernels.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stages/trit_draws.h"

namespace gradwire::scalar {

inline void draw_trits(const float* b, size_t n, TritDraw draw, const uint32_t* words,
                       uint64_t* plus, uint64_t* minus) {
  std::fill_n(plus, trit_words(n), 0);
  std::fill_n(minus, trit_words(n), 0);
  for (size_t i = 0; i < n; ++i) {
    const int trit = draw_trit(b[i], draw, words[i]);
    if (trit != 0) set_trit(plus, minus, i, trit);
  }
}

inline void pack_trits(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* packed) {
  pack_trit_bits(plus, minus, n, packed);
}

inline void pack_two_bits(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* packed) {
  pack_two_bit_words(plus, minus, n, packed);
}

// Calls put(value index, trit) for n trits of two bits.
template <typename Put>
bool unpack_two_bits_each(const uint8_t* packed, size_t n, Put put) {
  bool valid = true;
  for (size_t i = 0; i < kTwoBitTrits * two_bit_size(n); ++i) {
    const int code = packed[i / kTwoBitTrits] >> 2 * (i % kTwoBitTrits) & 3;
    valid &= code != 3 && (i < n || code == 0);
    if (i < n) put(i, two_bit_trit(code));
  }
  return valid;
}

inline bool unpack_two_bits(const uint8_t* packed, size_t n, float m, float* out) {
  return unpack_two_bits_each(packed, n,
                              [=](size_t i, int trit) { out[i] = ternary_value(trit, m); });
}

inline bool unpack_two_bits_add(const uint8_t* packed, size_t n, float m, float* out) {
  return unpack_two_bits_each(
      packed, n, [=](size_t i, int trit) { out[i] = ternary_accumulate(out[i], trit, m); });
}

inline bool add_two_bits(const uint8_t* packed, size_t n, int8_t* sums) {
  return unpack_two_bits_each(packed, n,
                              [=](size_t i, int trit) { sums[i] = trit_sum(sums[i], trit); });
}

}  // namespace gradwire::scalar
