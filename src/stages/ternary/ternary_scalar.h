#pragma once

// The scalar kernels of ternary quantization. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stages/element/residual_access.h"
#include "stages/ternary/nearest_trit.h"
#include "stages/ternary/trit_draws.h"
#include "stages/trits/trit.h"
#include "stages/trits/trit_bits.h"
#include "stages/zero_run/zero_run_scalar.h"

namespace gradwire::scalar {

// Returns a function: it gives the trit of b = x + r for element i and stores the new residual.
template <class Residual>
auto nearest_trits(const float* x, Residual residual, float m) {
  return [=, h = m * 0.5f](size_t i) {
    const float b = residual.add(x[i], i);
    const int trit = ternary_trit(b, h);
    residual.set(ternary_residual(b, trit, m), i);
    return trit;
  };
}

inline void ternary_pack(const float* x, ResidualValues r, size_t n, float m, uint8_t* packed) {
  with_residual(r, [=](auto residual) {
    const auto trit = nearest_trits(x, residual, m);
    for (size_t first = 0; first < n; first += kTritsPerByte) {
      const size_t count = std::min<size_t>(kTritsPerByte, n - first);
      int byte = kZeroByte;
      for (size_t place = 0; place < count; ++place) {
        byte += trit(first + place) * trit_weight(static_cast<int>(place));
      }
      packed[first / kTritsPerByte] = static_cast<uint8_t>(byte);
    }
  });
}

inline size_t ternary_encode(const float* x, ResidualValues r, size_t n, float m, uint8_t* codes) {
  uint8_t packed[kMaxRunInput];
  ternary_pack(x, r, n, m, packed);
  return zero_run_encode(packed, packed_size(n), codes);
}

// Sets the bit of trit_of(i) for each i < n.
template <typename TritAt>
void set_trits(size_t n, uint64_t* plus, uint64_t* minus, const TritAt& trit_of) {
  std::fill_n(plus, trit_words(n), 0);
  std::fill_n(minus, trit_words(n), 0);
  for (size_t i = 0; i < n; ++i) {
    const int trit = trit_of(i);
    if (trit != 0) set_trit(plus, minus, i, trit);
  }
}

inline void trit_bits(const float* x, ResidualValues r, size_t n, float m, uint64_t* plus,
                      uint64_t* minus) {
  with_residual(r,
                [=](auto residual) { set_trits(n, plus, minus, nearest_trits(x, residual, m)); });
}

inline void draw_trits(const float* b, size_t n, TritDraw draw, const uint32_t* words,
                       uint64_t* plus, uint64_t* minus) {
  set_trits(n, plus, minus, [=](size_t i) { return draw_trit(b[i], draw, words[i]); });
}

}  // namespace gradwire::scalar
