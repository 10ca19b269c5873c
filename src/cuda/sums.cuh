#pragma once

// Sums in the order that the format fixes (spec/format.md, Sums). It makes the additions of a lane
// wait for each other; so nothing else may: one warp of a block adds what the others load, and a
// second lane for each of the format's adds something else of the same values.

#include <cstdint>

#include "cuda/block.cuh"
#include "cuda/input.cuh"
#include "cuda/segments.h"
#include "stages/element.h"

namespace gradwire::cuda {

// Of a part of at most kChunkValues values: two sums, and how many values are of some kind.
struct PartSums {
  double of[2];
  uint64_t count;
};

inline constexpr uint32_t kLoaders = kThreads - kLanes;
inline constexpr uint32_t kTileValues = kUnrolled * kLoaders;

struct SumTiles {
  float values[2][kTileValues];  // one is filled while the other is added up
};

// Which of the two sums a lane of the adding warp is at.
__device__ inline unsigned which_sum() { return lane() / kMomentLanes; }

// In warp 0: the sum of a part, lane by lane. Returned is sum 0 in lane 0, sum 1 in lane
// kMomentLanes.
__device__ inline double add_lanes(double sum) {
  for (unsigned half = kMomentLanes / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(kAllLanes, sum, half);
  }
  return sum;
}

// Calls loaded(at, b) for the n values from `begin` on, and for lanes behind the end with b = 0,
// all lanes of a warp together; and in warp 0, meanwhile, full(values, there) for tile after tile
// of them. The whole block calls it.
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

// Adds term(b) of n values. Returned as from add_lanes, in warp 0.
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

// The sums of `count` parts, in order, in every thread. The whole block calls it.
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
