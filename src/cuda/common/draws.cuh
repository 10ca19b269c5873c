#pragma once

// Draws random words (base/philox.h) for the values that Input loads.

#include <cstdint>

#include "base/philox.h"
#include "cuda/common/block.cuh"
#include "cuda/common/input.cuh"
#include "cuda/common/segments.h"

namespace gradwire::cuda {

__device__ inline DrawStream draw_stream_of(const DrawContext& draw, const Segment& segment) {
  return DrawStream::create(draw.seed, draw.stream + segment.draw_stream, draw.step);
}

// Draws the words of a thread's kUnrolled values; the i-th stands at `first` + i * kThreads in the
// segment. A block of Philox holds the words of four neighbouring values, which four neighbouring
// lanes need: each lane computes one block for all four lanes, and the lanes swap words.
// `first` % 4 == lane() % 4 in every lane.
__device__ inline void draw_words(const DrawStream& stream, uint64_t first,
                                  uint32_t (&words)[kUnrolled]) {
  static_assert(kUnrolled % 4 == 0 && kThreads % 4 == 0);
  const unsigned own = lane() % 4;
#pragma unroll
  for (uint32_t row = 0; row < kUnrolled; row += 4) {
    const PhiloxBlock block = stream.words((first + (row + own) * kThreads) / 4);
#pragma unroll
    for (unsigned swap = 0; swap < 4; ++swap) {
      // Lane own ^ swap gets its word of the row that this lane has computed.
      const unsigned partner = own ^ swap;
      const uint32_t given = partner == 0   ? block.word[0]
                             : partner == 1 ? block.word[1]
                             : partner == 2 ? block.word[2]
                                            : block.word[3];
      const uint32_t taken = __shfl_xor_sync(kAllLanes, given, static_cast<int>(swap));
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) {
        if (i == partner) words[row + i] = taken;
      }
    }
  }
}

}  // namespace gradwire::cuda
