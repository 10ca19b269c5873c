#pragma once

#include <algorithm>
#include <cstdint>

#include "codecs/chunked_codec.h"
#include "codecs/ternary.h"
#include "codecs/threshold.h"
#include "stages/ternary/nearest_trit.h"

namespace gradwire {

// The signs of the values of a chunk whose magnitudes reach the threshold and which
// sends(value, index in the tensor) takes; the others are 0. A residual gets what they leave when
// they stand for m and -m.
template <typename Sends>
void find_reached_trits(const Encoding& encoding, uint64_t chunk, float threshold, float m,
                        TritBits& trits, const Sends& sends) {
  const Input& input = encoding.input;
  const uint64_t n = encoding.shape.chunks.values(chunk);
  float buffer[Input::kPartValues];
  for (uint64_t first = 0; first < n; first += Input::kPartValues) {
    const uint64_t values = std::min(Input::kPartValues, n - first);
    const uint64_t begin = encoding.shape.chunks.begin(chunk) + first;
    const float* b = input.load(begin, values, buffer);
    uint64_t* plus = trits.plus + first / kWordBits;
    uint64_t* minus = trits.minus + first / kWordBits;
    std::fill_n(minus, trit_words(values), 0);
    input.kernels().threshold_bits(b, values, threshold, plus);
    for_each_set_bit(plus, values, [&](uint64_t i) {
      const bool sent = sends(b[i], begin + i);
      const bool negative = b[i] < 0.0f;
      const uint64_t bit = uint64_t{1} << i % kWordBits;
      if (negative || !sent) plus[i / kWordBits] &= ~bit;
      if (negative && sent) minus[i / kWordBits] |= bit;
      // Without a residual, b may be the caller's memory, which must not change.
      if (sent && input.keeps_residual()) {
        buffer[i] = ternary_residual(b[i], negative ? -1 : 1, m);
      }
    });
    if (input.keeps_residual()) input.store(begin, values, buffer);
  }
}

}  // namespace gradwire
