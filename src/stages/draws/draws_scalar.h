#pragma once

// The scalar kernel of random words. Contract: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/philox.h"

namespace gradwire::scalar {

inline void draw_words(const DrawStream& draw_stream, uint64_t first, size_t n, uint32_t* words) {
  for (size_t i = 0; i < n; i += 4) {
    const PhiloxBlock block = draw_stream.words((first + i) / 4);
    std::copy_n(block.word, std::min<size_t>(4, n - i), words + i);
  }
}

}  // namespace gradwire::scalar
