// terngrad and stoch3, whose trits are drawn.

#include <cstdint>

#include "codecs/registry.h"
#include "codecs/stoch3/stoch3.h"
#include "codecs/terngrad/terngrad.h"
#include "cuda/common/sums.cuh"
#include "cuda/ternary/ternary_kernels.cuh"
#include "stages/ternary/trit_draws.h"

namespace gradwire::cuda {
namespace {

// The first pass where values are clipped: finds the sum and the sum of squares of each chunk, and
// the largest magnitudes.
GW_KERNEL void find_moments(Segments segments, Encoding encoding, PartSums* sums) {
  __shared__ SumTiles tiles;
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const ScaleOf scale_of(chunk);
  const bool several = chunk.segment.scales > 1;
  uint32_t largest = 0;
  const double sum = add_part(
      encoding.input, chunk.begin, chunk.n, tiles,
      [&](uint32_t at, float b) {
        largest = max(largest, magnitude_bits(b));
        if (several) {
          raise_scale(chunk, scale_of, at, magnitude_bits(b), encoding.magnitudes.of_scale);
        }
      },
      [](float b) {
        const double wide = b;
        return which_sum() == 0 ? wide : wide * wide;
      });
  if (threadIdx.x % kMomentLanes == 0 && warp() == 0) sums[blockIdx.x].of[which_sum()] = sum;
  largest = block_max(largest, shared);
  if (threadIdx.x == 0) raise_segment(chunk, largest, several, encoding.magnitudes);
}

// Finds the limit to which each segment's values are clipped; each block handles one segment.
GW_KERNEL void find_limits(Segments segments, const PartSums* sums, float clip, float* limits) {
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

  float clip;               // times the standard deviation; 0: no value is clipped
  float* limits = nullptr;  // of each segment
  float limit = FLT_MAX;

  void measure(Call& call, const Encoding& encoding) {
    if (clip == 0.0f) return measure_magnitudes(call, encoding);
    auto* sums = call.take<PartSums>(call.segments.chunks);
    limits = call.take<float>(call.segments.count);
    call.launch(find_moments, call.segments.chunks, encoding, sums);
    call.launch(find_limits, call.segments.count, sums, clip, limits);
  }

  __device__ void begin(uint32_t index) {
    if (limits != nullptr) limit = limits[index];
  }
  __device__ float scale(uint32_t largest) const {
    const float most = float_of(largest);
    return most < limit ? most : limit;
  }
  __device__ int trit(float b, uint32_t word, uint32_t largest) const {
    return draw_trit(b, TritDraw::create(limit, scale(largest)), word);
  }
};

}  // namespace

std::unique_ptr<const CodecKernels> kernel_factories::terngrad(const Codec& codec) {
  const TernGradParameters& parameters = *parameters_of<TernGradParameters>(codec);
  return std::make_unique<TernaryKernels<DrawnQuantizer>>(DrawnQuantizer{.clip = parameters.clip},
                                                          parameters.coder);
}

std::unique_ptr<const CodecKernels> kernel_factories::stoch3(const Codec& codec) {
  return std::make_unique<TernaryKernels<DrawnQuantizer>>(
      DrawnQuantizer{.clip = 0}, parameters_of<Stoch3Parameters>(codec)->coder);
}

}  // namespace gradwire::cuda
