#pragma once

// Which values of a chunk topk sends, in shared memory.

#include <cstdint>

#include "codecs/topk/topk.h"
#include "cuda/block.cuh"
#include "cuda/ternary_code.cuh"

namespace gradwire::cuda {

// Which values of a chunk are sent, as trits that are never -1.
struct SentValues {
  TritWords trits;
  uint16_t before[kChunkWords];  // values sent in front of each word
  uint32_t count;
};

GW_HOST_DEVICE inline uint32_t width_of(SentAs sent_as) {
  return sent_as == SentAs::kFloat32 ? sizeof(float) : sizeof(uint16_t);
}

// Fills in all but the trits, of n values.
__device__ inline void count_sent(uint32_t n, SentValues& sent, BlockShared& shared) {
  constexpr uint32_t kEach = kChunkWords / kThreads;
  const uint32_t words = (n + 31) / 32;
  const uint32_t first = threadIdx.x * kEach;
  uint32_t own = 0;
  for (uint32_t i = first; i < first + kEach && i < words; ++i) {
    own += static_cast<uint32_t>(__popc(sent.trits.plus[i]));
  }
  uint32_t count = 0;
  uint32_t before = block_exclusive_sum(own, shared, count);
  for (uint32_t i = first; i < first + kEach && i < words; ++i) {
    sent.before[i] = static_cast<uint16_t>(before);
    before += static_cast<uint32_t>(__popc(sent.trits.plus[i]));
  }
  if (threadIdx.x == 0) sent.count = count;
  __syncthreads();
}

// Calls body(at, sent, rank) for each of n values, a warp 32 neighbours; `rank` of those sent.
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
