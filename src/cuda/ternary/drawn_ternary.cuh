#pragma once

#include <cstdint>

#include "base/return_if_error.h"
#include "cuda/common/sums.cuh"
#include "cuda/ternary/ternary_kernels.cuh"
#include "stages/ternary/trit_draws.h"

namespace gradwire::cuda {

// The first pass where values are clipped: finds the sum and the sum of squares of each chunk, and
// the largest magnitudes.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    find_moments(Segments segments, Input input, Magnitudes magnitudes, PartSums* sums) {
  __shared__ SumTiles tiles;
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const ScaleOf scale_of(chunk);
  const bool several = chunk.segment.scales > 1;
  uint32_t largest = 0;
  const double sum = add_part(
      input, chunk.begin, chunk.n, tiles,
      [&](uint32_t at, float b) {
        largest = max(largest, magnitude_bits(b));
        if (several) raise_scale(chunk, scale_of, at, magnitude_bits(b), magnitudes.of_scale);
      },
      [](float b) {
        const double wide = b;
        return which_sum() == 0 ? wide : wide * wide;
      });
  if (threadIdx.x % kMomentLanes == 0 && warp() == 0) sums[blockIdx.x].of[which_sum()] = sum;
  largest = block_max(largest, shared);
  if (threadIdx.x == 0) raise_segment(chunk, largest, several, magnitudes);
}

// Finds what the values of each segment are clipped to; each block handles one segment.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    find_limits(Segments segments, const PartSums* sums, float clip, float* limits) {
  __shared__ PartsShared shared;
  const Segment segment = segments.segments[blockIdx.x];
  const PartSums total = add_parts(sums + segment.first_chunk, segment.chunks, shared);
  if (threadIdx.x != 0) return;
  const Moments moments{.sum = total.of[0], .squares = total.of[1], .largest = 0};
  limits[blockIdx.x] = clipping_limit(moments, segment.n, clip);
}

// TernGrad, section 3: b is clipped, and trits are drawn with the probability |b| / scale.
struct DrawnQuantizer {
  static constexpr bool kDraws = true;

  // Its part of a call's scratch.
  struct Kept {
    PartSums* sums;  // of each chunk
    float* limits;   // of each segment
  };

  float clip;  // times the standard deviation; 0: no value is clipped
  Kept kept{};
  float limit = FLT_MAX;

  void take_scratch(const Segments& segments, ScratchLayout& layout) {
    if (clip == 0.0f) return;
    kept = {.sums = layout.take<PartSums>(segments.chunks),
            .limits = layout.take<float>(segments.count)};
  }

  [[nodiscard]] Status measure(const Segments& segments, const Input& input,
                               const Magnitudes& magnitudes, cudaStream_t stream) const {
    if (clip == 0.0f) {
      return queue_magnitudes(segments, input, magnitudes, stream);
    }
    GW_RETURN_IF_ERROR(
        launch(find_moments, segments.chunks, stream, segments, input, magnitudes, kept.sums));
    return launch(find_limits, segments.count, stream, segments,
                  static_cast<const PartSums*>(kept.sums), clip, kept.limits);
  }

  __device__ void begin(uint32_t index) {
    if (kept.limits != nullptr) limit = kept.limits[index];
  }
  __device__ float scale(uint32_t largest) const {
    const float most = float_of(largest);
    return most < limit ? most : limit;
  }
  __device__ int trit(float b, uint32_t word, uint32_t largest) const {
    return draw_trit(b, TritDraw::create(limit, scale(largest)), word);
  }
};

}  // namespace gradwire::cuda
