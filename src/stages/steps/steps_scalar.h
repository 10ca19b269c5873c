#pragma once

// The scalar kernels of steps. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stages/steps/steps.h"
#include "stages/trits/trit_bits.h"

namespace gradwire::scalar {

template <typename Bits>
size_t find_steps(const StepArrays<Bits>& arrays, size_t n, ElementOrder order, StepBits steps) {
  size_t changed = 0;
  const size_t words = trit_words(n);
  for (uint64_t* bits : {steps.changed, steps.minus, steps.far}) std::fill_n(bits, words, 0);
  for (size_t i = 0; i < n; ++i) {
    const Bits before = arrays.from[i];
    const Bits after = arrays.to[i];
    if (arrays.before != nullptr) arrays.before[i] = before;
    arrays.after[i] = after;
    const Bits step = step_between(before, after, order);
    if (step == 0) continue;
    ++changed;
    const uint64_t bit = uint64_t{1} << i % kWordBits;
    steps.changed[i / kWordBits] |= bit;
    if (is_negative_step(step)) steps.minus[i / kWordBits] |= bit;
    if (step_size(step) != 1) steps.far[i / kWordBits] |= bit;
  }
  return changed;
}

inline size_t find_steps8(const StepArrays<uint8_t>& arrays, size_t n, ElementOrder order,
                          StepBits steps) {
  return find_steps(arrays, n, order, steps);
}
inline size_t find_steps16(const StepArrays<uint16_t>& arrays, size_t n, ElementOrder order,
                           StepBits steps) {
  return find_steps(arrays, n, order, steps);
}
inline size_t find_steps32(const StepArrays<uint32_t>& arrays, size_t n, ElementOrder order,
                           StepBits steps) {
  return find_steps(arrays, n, order, steps);
}

template <typename Bits>
void move_by_one(Bits* values, size_t n, ElementOrder order, const uint64_t* changed,
                 const uint64_t* minus) {
  for (size_t i = 0; i < n; ++i) {
    if ((changed[i / kWordBits] >> i % kWordBits & 1) == 0) continue;
    const bool negative = (minus[i / kWordBits] >> i % kWordBits & 1) != 0;
    values[i] = step_from(values[i], static_cast<Bits>(negative ? -1 : 1), order);
  }
}

inline void move_by_one8(uint8_t* values, size_t n, ElementOrder order, const uint64_t* changed,
                         const uint64_t* minus) {
  move_by_one(values, n, order, changed, minus);
}
inline void move_by_one16(uint16_t* values, size_t n, ElementOrder order, const uint64_t* changed,
                          const uint64_t* minus) {
  move_by_one(values, n, order, changed, minus);
}
inline void move_by_one32(uint32_t* values, size_t n, ElementOrder order, const uint64_t* changed,
                          const uint64_t* minus) {
  move_by_one(values, n, order, changed, minus);
}

inline void move_by_steps8(uint8_t* values, size_t n, ElementOrder order, const uint32_t* steps) {
  move_each(values, n, order, steps);
}
inline void move_by_steps16(uint16_t* values, size_t n, ElementOrder order, const uint32_t* steps) {
  move_each(values, n, order, steps);
}
inline void move_by_steps32(uint32_t* values, size_t n, ElementOrder order, const uint32_t* steps) {
  move_each(values, n, order, steps);
}

}  // namespace gradwire::scalar
