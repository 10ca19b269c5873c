#pragma once

// The two means of each group of onebit.

#include <cstdint>

#include "cuda/common/magnitudes.cuh"
#include "cuda/common/sums.cuh"
#include "stages/signs/signs.h"

namespace gradwire::cuda {

// Each group is added up in parts of kChunkValues from its own begin on, so parts are not chunks
// where there are several groups. Each block handles the parts that begin in its chunk.
struct SignScratch {
  PartSums* sums;      // of the parts: segments.chunks + segments.scales are enough
  SignMeans* means;    // of each scale
  uint32_t* anything;  // of each segment: whether a mean is not 0
};

__device__ inline uint64_t parts_of_group(const Segment& segment) {
  return (segment.group_size + kChunkValues - 1) / kChunkValues;
}

// The sums of a group's parts, one after the other.
__device__ inline PartSums* sums_of_group(const Segment& segment, uint64_t group, PartSums* sums) {
  return sums + segment.first_chunk + segment.first_scale + group * parts_of_group(segment);
}

// A value's term in either sum. The other sum gets +0, which changes no bit.
__device__ inline double sign_term(float b) {
  return (b < 0.0f) == (which_sum() == 1) ? static_cast<double>(b) : 0.0;
}

// Each smaller group is added up by one warp, without tiles.
inline constexpr uint64_t kBlockGroup = kChunkValues / kWarps;

__device__ inline void sum_small_groups(const Chunk& chunk, const Input& input,
                                        const SignScratch& scratch, uint32_t& largest) {
  const Segment& segment = chunk.segment;
  const uint64_t end = chunk.end_scale();
  for (uint64_t group = chunk.first_scale() + warp(); group < end; group += kWarps) {
    const auto n = static_cast<uint32_t>(segment.values_of_group(group));
    const uint64_t begin = segment.begin + group * segment.group_size;
    double sum = 0;
    uint32_t negatives = 0;
#pragma unroll 4
    for (uint32_t at = lane() % kMomentLanes; at < n; at += kMomentLanes) {
      const float b = input.at(begin + at);
      largest = max(largest, magnitude_bits(b));
      negatives += b < 0.0f && which_sum() == 0 ? 1 : 0;
      sum += sign_term(b);
    }
    sum = add_lanes(sum);
    negatives = __reduce_add_sync(kAllLanes, negatives);
    PartSums* sums = sums_of_group(segment, group, scratch.sums);
    if (lane() % kMomentLanes == 0) sums->of[which_sum()] = sum;
    if (lane() == 0) sums->count = negatives;
  }
}

__device__ inline void sum_large_groups(const Chunk& chunk, const Input& input,
                                        const SignScratch& scratch, uint32_t& largest) {
  __shared__ SumTiles tiles;
  __shared__ BlockShared shared;
  const Segment& segment = chunk.segment;
  uint64_t group = chunk.first / segment.group_size;
  const uint64_t within = chunk.first - group * segment.group_size;
  uint64_t part = (within + kChunkValues - 1) / kChunkValues;
  while (true) {
    if (part * kChunkValues >= segment.group_size) {
      ++group;
      part = 0;
    }
    const uint64_t begin = group * segment.group_size + part * kChunkValues;
    if (begin >= chunk.first + chunk.n) return;
    const uint64_t rest = segment.values_of_group(group) - part * kChunkValues;
    const auto n = static_cast<uint32_t>(rest < kChunkValues ? rest : kChunkValues);
    uint32_t negatives = 0;
    const double sum = add_part(
        input, segment.begin + begin, n, tiles,
        [&](uint32_t, float b) {
          largest = max(largest, magnitude_bits(b));
          negatives += b < 0.0f ? 1 : 0;
        },
        sign_term);
    uint32_t total = 0;
    block_exclusive_sum(negatives, shared, total);
    PartSums* sums = sums_of_group(segment, group, scratch.sums) + part;
    if (warp() == 0 && lane() % kMomentLanes == 0) sums->of[which_sum()] = sum;
    if (threadIdx.x == 0) sums->count = total;
    ++part;
  }
}

static GW_KERNEL void sum_signs(Segments segments, Encoding encoding, SignScratch scratch) {
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  if (chunk.of_segment == 0 && threadIdx.x == 0) scratch.anything[chunk.index] = 0;
  uint32_t largest = 0;
  if (chunk.segment.scales > 1 && chunk.segment.group_size < kBlockGroup) {
    sum_small_groups(chunk, encoding.input, scratch, largest);
  } else {
    sum_large_groups(chunk, encoding.input, scratch, largest);
  }
  largest = block_max(largest, shared);
  if (threadIdx.x == 0) atomicMax(&encoding.magnitudes.of_segment[chunk.index], largest);
}

// Finds the means of the groups that begin in each chunk.
static GW_KERNEL void find_means(Segments segments, SignScratch scratch) {
  __shared__ PartsShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const Segment& segment = chunk.segment;
  const uint64_t end = chunk.end_scale();
  const auto put = [&](uint64_t group, const PartSums& sums) {
    const SignSums signs{.positive = sums.of[0], .negative = sums.of[1], .negatives = sums.count};
    const SignMeans means = SignMeans::create(signs, segment.values_of_group(group));
    scratch.means[segment.first_scale + group] = means;
    if (means.positive != 0.0f || means.negative != 0.0f) scratch.anything[chunk.index] = 1;
  };
  if (segment.group_size <= kChunkValues) {
    for (uint64_t i = chunk.first_scale() + threadIdx.x; i < end; i += kThreads) {
      put(i, *sums_of_group(segment, i, scratch.sums));
    }
    return;
  }
  // At most one group begins here.
  const uint64_t group = chunk.first_scale();
  if (group >= end) return;
  const uint64_t parts = (segment.values_of_group(group) + kChunkValues - 1) / kChunkValues;
  const PartSums total = add_parts(sums_of_group(segment, group, scratch.sums), parts, shared);
  if (threadIdx.x == 0) put(group, total);
}

}  // namespace gradwire::cuda
