#pragma once

// How the values of each bucket become levels (stages/levels.h): norms, units, inverses.

#include <cstdint>

#include "base/return_if_error.h"
#include "codecs/qsgd/qsgd.h"
#include "cuda/block.cuh"
#include "cuda/codec_kernels.h"
#include "cuda/magnitudes.cuh"
#include "cuda/unaligned.cuh"
#include "stages/levels.h"

namespace gradwire::cuda {

struct LevelStep {
  float unit;
  LevelScale scale;  // unspecified where the unit is 0
};

// Values whose squares are added up by themselves, before their sums are (spec/format.md, qsgd).
inline constexpr uint64_t kPartValues = 4096;
inline constexpr uint32_t kPartsOfChunk = kChunkValues / kPartValues;

// The sums of a segment's parts lie at first_scale + kPartsOfChunk * first_chunk; each bucket has
// the same number of places.
GW_HOST_DEVICE inline uint64_t square_parts(const Segment& segment) {
  return (segment.bucket + kPartValues - 1) / kPartValues;
}
GW_HOST_DEVICE inline uint64_t first_part(const Segment& segment) {
  return segment.first_scale + uint64_t{kPartsOfChunk} * segment.first_chunk;
}
GW_HOST_DEVICE inline uint64_t most_parts(const Segments& segments) {
  return segments.scales + uint64_t{kPartsOfChunk} * segments.chunks;
}

// Sums of squares, half a warp a part: as in moments.cuh, each lane adds up its own.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    sum_squares(Segments segments, Input input, double* squares) {
  const uint64_t number =
      (static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x) / kMomentLanes;
  uint32_t low = 0;  // the last segment whose parts begin there or before
  for (uint32_t high = segments.count; high - low > 1;) {
    const uint32_t middle = low + (high - low) / 2;
    (first_part(segments.segments[middle]) <= number ? low : high) = middle;
  }
  const Segment segment = segments.segments[low];
  const uint64_t part = number - first_part(segment);
  const uint64_t bucket = part / square_parts(segment);
  const uint64_t first = bucket * segment.bucket + part % square_parts(segment) * kPartValues;
  const uint64_t bucket_end = (bucket + 1) * segment.bucket;
  const uint64_t end = bucket_end < segment.n ? bucket_end : segment.n;
  const bool there = bucket < segment.scales && first < end;
  const uint64_t rest = there ? end - first : 0;
  const auto n = static_cast<uint32_t>(rest < kPartValues ? rest : kPartValues);
  double sum = 0;
#pragma unroll 8
  for (uint32_t at = threadIdx.x % kMomentLanes; at < n; at += kMomentLanes) {
    const double b = input.at(segment.begin + first + at);
    sum += b * b;
  }
  for (unsigned half = kMomentLanes / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(kAllLanes, sum, half);
  }
  if (there && threadIdx.x % kMomentLanes == 0) squares[number] = sum;
}

// Turns magnitudes, or the sums of squares where there are any, into steps; writes the units into
// the payloads.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    make_steps(Segments segments, int32_t levels, Magnitudes magnitudes, const double* squares,
               LevelStep* steps, uint8_t* payloads) {
  const uint64_t number = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (number >= segments.scales) return;
  const auto scale = static_cast<uint32_t>(number);
  const uint32_t index = segment_of_scale(segments, scale);
  const Segment segment = segments.segments[index];
  const uint64_t bucket = scale - segment.first_scale;
  uint32_t norm = 0;
  if (squares == nullptr) {
    norm = magnitudes.of_scale[scale];
  } else {
    const uint64_t rest = segment.n - bucket * segment.bucket;
    const uint64_t values = rest < segment.bucket ? rest : segment.bucket;
    const uint64_t part = first_part(segment) + bucket * square_parts(segment);
    double sum = 0;
#pragma unroll 8
    for (uint64_t i = 0; i * kPartValues < values; ++i) sum += squares[part + i];
    norm = magnitude_bits(l2_norm_of(sum));
    // Most are not the largest, which one look tells.
    uint32_t* largest = &magnitudes.of_segment[index];
    if (norm > *static_cast<volatile uint32_t*>(largest)) atomicMax(largest, norm);
  }
  LevelStep step{};
  if (norm != 0 && norm < kNonFiniteBits) {
    step.unit = level_unit(float_of(norm), levels);
    step.scale = level_scale(step.unit, levels);
  }
  steps[scale] = step;
  store_word(payloads + segment.payload + 4 * bucket, bits_of(step.unit));
}

}  // namespace gradwire::cuda
