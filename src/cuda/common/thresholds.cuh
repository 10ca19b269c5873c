#pragma once

// Finds a threshold for each segment: the magnitude with a given rank among samples
// (stages/threshold/sample.h).

#include <cstdint>

#include "cuda/common/block.cuh"
#include "cuda/common/input.cuh"
#include "cuda/common/segments.h"
#include "stages/threshold/sample.h"

namespace gradwire::cuda {

// Each block handles one segment. It finds the magnitude bit by bit, from the highest: a bit is set
// if more samples than the rank reach the magnitude with this bit.
static GW_KERNEL void find_thresholds(Segments segments, Input input, float fraction,
                                      float* thresholds) {
  constexpr uint32_t kEach = kSamples / kThreads;
  __shared__ BlockShared shared;
  const Segment segment = segments.segments[blockIdx.x];
  if (segment.n == 0) return;
  const uint64_t count = segment.n < kSamples ? segment.n : kSamples;
  const DrawStream draws = sample_draws();
  uint32_t magnitudes[kEach];
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t sample = threadIdx.x + i * kThreads;
    magnitudes[i] = 0;
    if (sample >= count) continue;
    const uint64_t place = sample_place(segment.n, sample, draws.word(sample));
    magnitudes[i] = magnitude_bits(input.at(segment.begin + place));
  }
  const uint64_t rank = sample_rank(fraction, count);
  uint32_t found = 0;
  for (uint32_t bit = 1u << 30; bit != 0; bit >>= 1) {
    uint32_t reached = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) reached += magnitudes[i] >= (found | bit);
    if (block_sum(reached, shared) > rank) found |= bit;
  }
  if (fraction >= 1.0f) found = 0;
  if (threadIdx.x == 0) thresholds[blockIdx.x] = least_threshold(float_of(found));
}

}  // namespace gradwire::cuda
