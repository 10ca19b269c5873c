#pragma once

#include <bit>
#include <cstdint>

#include "codecs/input.h"

namespace gradwire {

// A magnitude that about `fraction` of the input's values reach: the magnitude at that rank among
// 4096 samples, one from each of as many equal strata (Aji and Heafield, EMNLP 2017, section 3,
// also sample). It is at least the smallest denormal, so that a zero never reaches it; with a
// fraction of 1, all other values do.
float sample_threshold(const Input& input, float fraction);

// Calls body(i) for each bit that is set among the n of a mask (Kernels::threshold_bits), in order.
template <typename Body>
void for_each_set_bit(const uint64_t* mask, uint64_t n, const Body& body) {
  for (uint64_t word = 0; word * 64 < n; ++word) {
    for (uint64_t bits = mask[word]; bits != 0; bits &= bits - 1) {
      body(word * 64 + static_cast<uint64_t>(std::countr_zero(bits)));
    }
  }
}

}  // namespace gradwire
