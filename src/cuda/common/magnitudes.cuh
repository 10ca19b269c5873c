#pragma once

// The first pass of codecs that scale by the largest magnitude, or refuse values that are not
// finite.

#include <cstdint>

#include "cuda/common/block.cuh"
#include "cuda/common/encoding.cuh"

namespace gradwire::cuda {

// Takes the magnitude of value `at` of a chunk with several scales into account. All lanes of a
// warp call it together.
__device__ inline void raise_scale(const Chunk& chunk, const ScaleOf& scale_of, uint32_t at,
                                   uint32_t bits, uint32_t* of_scale) {
  // Lanes usually have the same scale; then one lane raises it for all.
  uint32_t* own = at < chunk.n ? of_scale + chunk.segment.first_scale + scale_of(at) : nullptr;
  const auto common = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(own), 0);
  const bool same = own == nullptr || reinterpret_cast<unsigned long long>(own) == common;
  if (__ballot_sync(kAllLanes, same) == kAllLanes) {
    const uint32_t most = __reduce_max_sync(kAllLanes, bits);
    if (lane() == 0 && own != nullptr) atomicMax(own, most);
  } else if (own != nullptr) {
    atomicMax(own, bits);
  }
}

// Takes the largest magnitude of a chunk into account; `several`: raise_scale has seen the values.
__device__ inline void raise_segment(const Chunk& chunk, uint32_t largest, bool several,
                                     const Magnitudes& magnitudes) {
  if (magnitudes.of_scale != nullptr && !several) {
    atomicMax(&magnitudes.of_scale[chunk.segment.first_scale], largest);
  }
  atomicMax(&magnitudes.of_segment[chunk.index], largest);
}

// Blocks that share a chunk here. With one block for each chunk, an array of 1 M values would keep
// 26 multiprocessors waiting for memory 20 times.
inline constexpr uint32_t kPartsOfMagnitudes = 5;
inline constexpr uint32_t kPartOfMagnitudes = kChunkValues / kPartsOfMagnitudes;
static_assert(kPartsOfMagnitudes * kPartOfMagnitudes == kChunkValues);
static_assert(kPartOfMagnitudes % (kUnrolled * kThreads) == 0);

// Finds the magnitudes of each scale's group, if needed, and of each segment. kPartsOfMagnitudes
// blocks handle each chunk.
static GW_KERNEL void find_magnitudes(Segments segments, Encoding encoding) {
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x / kPartsOfMagnitudes);
  const uint32_t first = blockIdx.x % kPartsOfMagnitudes * kPartOfMagnitudes;
  if (first >= chunk.n) return;
  const uint64_t begin = chunk.begin + first;
  const uint32_t n = min(chunk.n - first, kPartOfMagnitudes);
  const Input& input = encoding.input;
  const Magnitudes& magnitudes = encoding.magnitudes;
  const bool several = magnitudes.of_scale != nullptr && chunk.segment.scales > 1;
  uint32_t largest = 0;
  if (several) {
    const ScaleOf scale_of(chunk);
    input.for_each(begin, n, [&](uint32_t at, float b) {
      raise_scale(chunk, scale_of, first + at, magnitude_bits(b), magnitudes.of_scale);
      largest = max(largest, magnitude_bits(b));
    });
  } else {
    input.for_each(begin, n, [&](uint32_t, float b) { largest = max(largest, magnitude_bits(b)); });
  }
  largest = block_max(largest, shared);
  if (threadIdx.x == 0) raise_segment(chunk, largest, several, magnitudes);
}

// Queues the first pass.
inline void measure_magnitudes(Call& call, const Encoding& encoding) {
  call.launch(find_magnitudes, uint64_t{kPartsOfMagnitudes} * call.segments.chunks, encoding);
}

}  // namespace gradwire::cuda
