#pragma once

// How the values of each group become levels (stages/levels/levels.h): norms, units, inverses.

#include <cstdint>

#include "cuda/common/magnitudes.cuh"
#include "cuda/common/sums.cuh"
#include "cuda/common/unaligned.cuh"
#include "stages/levels/levels.h"

namespace gradwire::cuda {

struct LevelStep {
  float unit;
  LevelScale scale;  // unspecified where the unit is 0
};

// Squares are added up in parts of so many values, and then the sums of the parts
// (spec/format.md, qsgd).
inline constexpr uint64_t kPartValues = 4096;
inline constexpr uint32_t kPartsOfChunk = kChunkValues / kPartValues;

// The sums of a segment's parts begin at first_part(segment); each group has square_parts(segment)
// places.
GW_HOST_DEVICE inline uint64_t square_parts(const Segment& segment) {
  return (segment.group_size + kPartValues - 1) / kPartValues;
}
GW_HOST_DEVICE inline uint64_t first_part(const Segment& segment) {
  return segment.first_scale + uint64_t{kPartsOfChunk} * segment.first_chunk;
}
GW_HOST_DEVICE inline uint64_t most_parts(const Segments& segments) {
  return segments.scales + uint64_t{kPartsOfChunk} * segments.chunks;
}

// Finds the sums of squares; half a warp handles each part, and each lane adds up its own values.
static GW_KERNEL void sum_squares(Segments segments, Input input, double* squares) {
  const uint64_t number = thread_number() / kMomentLanes;
  const Segment segment = segments.segments[segments.find(number, first_part)];
  const uint64_t part = number - first_part(segment);
  const uint64_t group = part / square_parts(segment);
  const uint64_t first = group * segment.group_size + part % square_parts(segment) * kPartValues;
  const uint64_t group_end = (group + 1) * segment.group_size;
  const uint64_t end = group_end < segment.n ? group_end : segment.n;
  const bool there = group < segment.scales && first < end;
  const uint64_t rest = there ? end - first : 0;
  const auto n = static_cast<uint32_t>(rest < kPartValues ? rest : kPartValues);
  double sum = 0;
#pragma unroll 8
  for (uint32_t at = threadIdx.x % kMomentLanes; at < n; at += kMomentLanes) {
    const double b = input.at(segment.begin + first + at);
    sum += b * b;
  }
  sum = add_lanes(sum);
  if (there && threadIdx.x % kMomentLanes == 0) squares[number] = sum;
}

// Turns magnitudes, or sums of squares if there are any, into steps, and writes the units into the
// payloads.
static GW_KERNEL void make_steps(Segments segments, Encoding encoding, int32_t levels,
                                 const double* squares, LevelStep* steps) {
  const uint64_t number = thread_number();
  if (number >= segments.scales) return;
  const auto scale = static_cast<uint32_t>(number);
  const uint32_t index = segment_of_scale(segments, scale);
  const Segment segment = segments.segments[index];
  const uint64_t group = scale - segment.first_scale;
  uint32_t norm = 0;
  if (squares == nullptr) {
    norm = encoding.magnitudes.of_scale[scale];
  } else {
    const uint64_t values = segment.values_of_group(group);
    const uint64_t part = first_part(segment) + group * square_parts(segment);
    double sum = 0;
#pragma unroll 8
    for (uint64_t i = 0; i * kPartValues < values; ++i) sum += squares[part + i];
    norm = magnitude_bits(l2_norm_of(sum));
    // A read is cheaper than an atomic operation, and most norms do not exceed the maximum so far.
    uint32_t* largest = &encoding.magnitudes.of_segment[index];
    if (norm > *static_cast<volatile uint32_t*>(largest)) atomicMax(largest, norm);
  }
  LevelStep step{};
  if (norm != 0 && norm < kNonFiniteBits) {
    step.unit = level_unit(float_of(norm), levels);
    step.scale = level_scale(step.unit, levels);
  }
  steps[scale] = step;
  store_word(encoding.payloads + segment.payload + 4 * group, bits_of(step.unit));
}

}  // namespace gradwire::cuda
