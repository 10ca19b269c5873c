#pragma once

// Lists far steps. Kernels of every target use this function, so it is inlined and compiled for the
// target.

#include <bit>
#include <cstddef>
#include <cstdint>

#include "hwy/base.h"

#include "stages/rice/rice_bits.h"
#include "stages/steps/steps.h"
#include "stages/trits/trit_bits.h"

namespace gradwire {

// Kernels::list_far_steps. append: as append_marks.
template <typename AppendMarks>
HWY_INLINE size_t list_far_marks(const StepBits& steps, size_t n, const AppendMarks& append,
                                 uint32_t* marks, uint16_t* gaps) {
  uint32_t before[trit_words(kMostRiceTrits)];  // changed elements before each word
  uint32_t changed = 0;
  size_t count = 0;
  for (size_t word = 0; word < trit_words(n); ++word) {
    before[word] = changed;
    changed += static_cast<uint32_t>(std::popcount(steps.plus[word] | steps.minus[word]));
    if (steps.far[word] == 0) continue;
    const auto first = static_cast<uint32_t>(2 * word * kWordBits);
    count += append(steps.far[word], steps.minus[word], first, marks + count);
  }
  uint32_t next = 0;  // the change after the last far one
  for (size_t i = 0; i < count; ++i) {
    const uint32_t place = place_of_mark(marks[i]);
    const size_t word = place / kWordBits;
    const uint64_t below = (uint64_t{1} << place % kWordBits) - 1;
    const uint64_t changed_below = (steps.plus[word] | steps.minus[word]) & below;
    const uint32_t at = before[word] + static_cast<uint32_t>(std::popcount(changed_below));
    gaps[i] = static_cast<uint16_t>(at - next);
    next = at + 1;
  }
  return count;
}

}  // namespace gradwire
