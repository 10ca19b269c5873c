#pragma once

#include <algorithm>
#include <cstdint>

#include "base/philox.h"
#include "stages/kernels.h"

namespace gradwire {

// Number of random words drawn together: they stay in the L1 cache until they are used, and a loop
// of draws alone keeps the multipliers busy.
inline constexpr uint64_t kDrawnWords = 2048;

// Calls body(first, count, words) for parts of the n elements from `begin` on, in order. `first`
// counts from `begin`, a multiple of 4, and is a multiple of kDrawnWords.
template <typename Body>
void for_each_drawn(const DrawStream& stream, uint64_t begin, uint64_t n, const Kernels& kernels,
                    const Body& body) {
  alignas(64) uint32_t words[kDrawnWords];
  for (uint64_t first = 0; first < n; first += kDrawnWords) {
    const uint64_t count = std::min(kDrawnWords, n - first);
    kernels.draw_words(stream, begin + first, count, words);
    body(first, count, words);
  }
}

}  // namespace gradwire
