#pragma once

// Sums in the order that the format fixes (spec/format.md, Sums). In this order the additions of a
// lane wait for each other, so nothing else may delay them: the other warps of a block load values,
// and one warp adds them. That warp has two lanes for each lane of the format; they add up two sums
// of the same values.

#include <cstdint>

#include "cuda/common/block.cuh"
#include "cuda/common/input.cuh"
#include "cuda/common/segments.h"
#include "stages/magnitude/moments.h"

namespace gradwire::cuda {

// Two sums of at most kChunkValues values, and a count of some of them.
struct PartSums {
  double of[2];
  uint64_t count;
};

inline constexpr uint32_t kLoaders = kThreads - kLanes;
inline constexpr uint32_t kTileValues = kUnrolled * kLoaders;

struct SumTiles {
  float values[2][kTileValues];  // one is filled while the other is added up
};

// Which of the two sums a lane of the adding warp adds up.
__device__ inline unsigned which_sum() { return lane() / kMomentLanes; }

// Adds up the lanes' sums, in the format's order. Lane 0 gets sum 0, and lane kMomentLanes sum 1.
__device__ inline double add_lanes(double sum) {
  for (unsigned half = kMomentLanes / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(kAllLanes, sum, half);
  }
  return sum;
}

// Calls loaded(at, b) for the n values from `begin` on, and with b = 0 for lanes after the end, all
// lanes of a warp together. Meanwhile warp 0 calls full(values, there) for tile after tile of the
// values. The whole block calls this function.
template <typename Loaded, typename Full>
__device__ void stage_part(const Input& input, uint64_t begin, uint32_t n, SumTiles& tiles,
                           const Loaded& loaded, const Full& full) {
  static_assert(kTileValues % kMomentLanes == 0);
  for (uint32_t first = 0; first < n + kTileValues; first += kTileValues) {
    const uint32_t tile = first / kTileValues;
    if (warp() > 0) {
      if (first < n) {
        const uint32_t own = threadIdx.x - kLanes;
        float b[kUnrolled];
        input.load<kLoaders>(begin, first + own, n, b);
#pragma unroll
        for (uint32_t i = 0; i < kUnrolled; ++i) {
          tiles.values[tile % 2][own + i * kLoaders] = b[i];
          loaded(first + own + i * kLoaders, b[i]);
        }
      }
    } else if (first > 0) {
      full(tiles.values[(tile - 1) % 2], min(n - (first - kTileValues), kTileValues));
    }
    __syncthreads();
  }
}

// Adds term(b) of n values. Warp 0 gets the result, as from add_lanes.
template <typename Loaded, typename Term>
__device__ double add_part(const Input& input, uint64_t begin, uint32_t n, SumTiles& tiles,
                           const Loaded& loaded, const Term& term) {
  static_assert(kLanes == 2 * kMomentLanes);
  double sum = 0;
  stage_part(input, begin, n, tiles, loaded, [&](const float* values, uint32_t there) {
#pragma unroll 8
    for (uint32_t at = lane() % kMomentLanes; at < there; at += kMomentLanes) {
      sum += term(values[at]);
    }
  });
  return warp() == 0 ? add_lanes(sum) : 0;
}

struct PartsShared {
  PartSums parts[kThreads];
  PartSums total;
};

// Adds up `count` parts in order, and returns the sums to every thread. The whole block calls it.
__device__ inline PartSums add_parts(const PartSums* parts, uint64_t count, PartsShared& shared) {
  double sum = 0;
  uint64_t number = 0;
  PartSums next{};
  if (threadIdx.x < count) next = parts[threadIdx.x];
  for (uint64_t first = 0; first < count; first += kThreads) {
    shared.parts[threadIdx.x] = next;
    __syncthreads();
    const uint64_t ahead = first + kThreads + threadIdx.x;
    if (ahead < count) next = parts[ahead];
    if (threadIdx.x < 2) {
      const uint64_t left = count - first;
      const auto there = static_cast<uint32_t>(left < kThreads ? left : kThreads);
      for (uint32_t i = 0; i < there; ++i) {
        sum += shared.parts[i].of[threadIdx.x];
        number += shared.parts[i].count;
      }
    }
    __syncthreads();
  }
  if (threadIdx.x < 2) shared.total.of[threadIdx.x] = sum;
  if (threadIdx.x == 0) shared.total.count = number;
  __syncthreads();
  const PartSums total = shared.total;
  __syncthreads();
  return total;
}

}  // namespace gradwire::cuda
