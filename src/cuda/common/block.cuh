#pragma once

// Maxima and sums over the threads of a block. All kThreads of them call each function, at the same
// place. No other code may use `shared` until the function returns.

#include <cstdint>

#include "cuda/common/launch.h"

namespace gradwire::cuda {

struct BlockShared {
  uint32_t of_warp[kWarps];
};

__device__ inline unsigned lane() { return threadIdx.x % kLanes; }
__device__ inline unsigned warp() { return threadIdx.x / kLanes; }

__device__ inline uint32_t warp_inclusive_sum(uint32_t value) {
  for (unsigned step = 1; step < kLanes; step *= 2) {
    const uint32_t before = __shfl_up_sync(kAllLanes, value, step);
    if (lane() >= step) value += before;
  }
  return value;
}

__device__ inline uint32_t warp_inclusive_max(uint32_t value) {
  for (unsigned step = 1; step < kLanes; step *= 2) {
    const uint32_t before = __shfl_up_sync(kAllLanes, value, step);
    if (lane() >= step && before > value) value = before;
  }
  return value;
}

// Combines what the warps have found, for every thread.
template <typename Combine>
__device__ uint32_t over_warps(uint32_t of_warp, BlockShared& shared, const Combine& combine) {
  if (lane() == 0) shared.of_warp[warp()] = of_warp;
  __syncthreads();
  uint32_t all = shared.of_warp[0];
  for (unsigned i = 1; i < kWarps; ++i) all = combine(all, shared.of_warp[i]);
  __syncthreads();
  return all;
}

// Returns the largest value of all threads, to every thread.
__device__ inline uint32_t block_max(uint32_t value, BlockShared& shared) {
  return over_warps(__reduce_max_sync(kAllLanes, value), shared,
                    [](uint32_t a, uint32_t b) { return max(a, b); });
}

// Returns the sum over all threads, to every thread.
__device__ inline uint32_t block_sum(uint32_t value, BlockShared& shared) {
  return over_warps(__reduce_add_sync(kAllLanes, value), shared,
                    [](uint32_t a, uint32_t b) { return a + b; });
}

// Returns the sum over the threads before this one; `total` becomes the sum over all threads.
__device__ inline uint32_t block_exclusive_sum(uint32_t value, BlockShared& shared,
                                               uint32_t& total) {
  const uint32_t inclusive = warp_inclusive_sum(value);
  if (lane() == kLanes - 1) shared.of_warp[warp()] = inclusive;
  __syncthreads();
  uint32_t before = 0;
  total = 0;
  for (unsigned i = 0; i < kWarps; ++i) {
    if (i < warp()) before += shared.of_warp[i];
    total += shared.of_warp[i];
  }
  __syncthreads();
  return before + inclusive - value;
}

// Returns the largest value of the threads before this one; 0 for the first thread.
__device__ inline uint32_t block_exclusive_max(uint32_t value, BlockShared& shared) {
  const uint32_t inclusive = warp_inclusive_max(value);
  if (lane() == kLanes - 1) shared.of_warp[warp()] = inclusive;
  __syncthreads();
  uint32_t before = __shfl_up_sync(kAllLanes, inclusive, 1);
  if (lane() == 0) before = 0;
  for (unsigned i = 0; i < warp(); ++i) before = max(before, shared.of_warp[i]);
  __syncthreads();
  return before;
}

}  // namespace gradwire::cuda
