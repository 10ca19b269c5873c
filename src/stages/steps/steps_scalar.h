#pragma once

// The scalar kernels of steps. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stages/steps/steps.h"
#include "stages/trits/trit_bits.h"

namespace gradwire::scalar {

template <typename Bits>
void find_steps(const Bits* from, const Bits* to, size_t n, ElementOrder order, StepBits steps) {
  const size_t words = trit_words(n);
  for (uint64_t* bits : {steps.plus, steps.minus, steps.far}) std::fill_n(bits, words, 0);
  for (size_t i = 0; i < n; ++i) {
    const Bits step = step_between(from[i], to[i], order);
    if (step == 0) continue;
    const uint64_t bit = uint64_t{1} << i % kWordBits;
    (is_negative_step(step) ? steps.minus : steps.plus)[i / kWordBits] |= bit;
    if (step_size(step) != 1) steps.far[i / kWordBits] |= bit;
  }
}

inline void find_steps8(const uint8_t* from, const uint8_t* to, size_t n, ElementOrder order,
                        StepBits steps) {
  find_steps(from, to, n, order, steps);
}
inline void find_steps16(const uint16_t* from, const uint16_t* to, size_t n, ElementOrder order,
                         StepBits steps) {
  find_steps(from, to, n, order, steps);
}
inline void find_steps32(const uint32_t* from, const uint32_t* to, size_t n, ElementOrder order,
                         StepBits steps) {
  find_steps(from, to, n, order, steps);
}

}  // namespace gradwire::scalar
