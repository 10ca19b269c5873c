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

GW_HOST_DEVICE inline uint32_t width_of(SentAs sent_as) {
  return sent_as == SentAs::kFloat32 ? sizeof(float) : sizeof(uint16_t);
}

// Payloads of topk (coded_layout.cuh).
struct SparseLayout {
  static constexpr uint32_t kScaleBytes = 0;
  static constexpr uint64_t kExtra = 1;  // there is at least one value
  static constexpr bool kEmptyIsZeros = true;

  SentAs sent_as;
  IndexCoder coder;

  __device__ uint32_t room(uint32_t n) const {
    const auto rice = static_cast<uint32_t>(kIndexSizeBytes + packed_size(n));
    return (coder == IndexCoder::kRice ? rice : (n + 7) / 8) + n * width_of(sent_as);
  }
  __device__ uint32_t least(uint32_t n) const {
    return coder == IndexCoder::kRice ? static_cast<uint32_t>(kIndexSizeBytes) : (n + 7) / 8;
  }
  __device__ static bool varying() { return true; }
};

// Fills in all but the trits, of n values.
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
