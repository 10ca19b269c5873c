#pragma once

// Which values of a chunk topk sends.

#include <cstdint>

#include "codecs/topk/topk.h"
#include "cuda/common/block.cuh"
#include "cuda/ternary/ternary_code.cuh"

namespace gradwire::cuda {

// Which values of a chunk are sent, as trits that are never -1; in shared memory.
struct SentValues {
  TritWords trits;
  uint16_t before[kChunkWords];  // values sent before each word
  uint32_t count;
};

__device__ inline uint32_t width_of(SentAs sent_as) {
  return sent_as == SentAs::kFloat32 ? sizeof(float) : sizeof(uint16_t);
}

// Counts the values that are sent before each word, and all of them. There are n values.
__device__ inline void count_sent(uint32_t n, SentValues& sent, BlockShared& shared) {
  const uint32_t count = count_before(
      n, [&](uint32_t word) { return sent.trits.plus[word]; }, sent.before, shared);
  if (threadIdx.x == 0) sent.count = count;
  __syncthreads();
}

// Calls body(at, sent, rank) for each of n values: whether it is sent, and how many values before
// it are. The lanes of a warp have neighbours.
template <typename Body>
__device__ void for_each_value(uint32_t n, const SentValues& sent, const Body& body) {
#pragma unroll 4
  for (uint32_t at = threadIdx.x; at < n; at += kThreads) {
    const uint32_t bits = sent.trits.plus[at / 32];
    const uint32_t before = bits & ((1u << lane()) - 1);
    body(at, (bits >> lane() & 1) != 0,
         sent.before[at / 32] + static_cast<uint32_t>(__popc(before)));
  }
}

}  // namespace gradwire::cuda
