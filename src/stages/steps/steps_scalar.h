#pragma once

// The scalar kernels of steps. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stages/steps/far_marks.h"
#include "stages/steps/steps.h"
#include "stages/trits/trit_bits.h"

namespace gradwire::scalar {

template <typename Bits>
size_t find_steps(const Bits* from, const Bits* to, size_t n, ElementOrder order, StepBits steps) {
  size_t changed = 0;
  const size_t words = trit_words(n);
  for (uint64_t* bits : {steps.plus, steps.minus, steps.far}) std::fill_n(bits, words, 0);
  for (size_t i = 0; i < n; ++i) {
    const Bits step = step_between(from[i], to[i], order);
    if (step == 0) continue;
    ++changed;
    const uint64_t bit = uint64_t{1} << i % kWordBits;
    (is_negative_step(step) ? steps.minus : steps.plus)[i / kWordBits] |= bit;
    if (step_size(step) != 1) steps.far[i / kWordBits] |= bit;
  }
  return changed;
}

inline size_t find_steps8(const uint8_t* from, const uint8_t* to, size_t n, ElementOrder order,
                          StepBits steps) {
  return find_steps(from, to, n, order, steps);
}
inline size_t find_steps16(const uint16_t* from, const uint16_t* to, size_t n, ElementOrder order,
                           StepBits steps) {
  return find_steps(from, to, n, order, steps);
}
inline size_t find_steps32(const uint32_t* from, const uint32_t* to, size_t n, ElementOrder order,
                           StepBits steps) {
  return find_steps(from, to, n, order, steps);
}

inline size_t list_far_steps(const StepBits& steps, size_t n, uint32_t* marks, uint16_t* gaps) {
  return list_far_marks(steps, n, append_marks, marks, gaps);
}

}  // namespace gradwire::scalar
