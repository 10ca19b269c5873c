#include "codecs/registry.h"
#include "codecs/stc/stc.h"
#include "cuda/common/sums.cuh"
#include "cuda/common/thresholds.cuh"
#include "cuda/ternary/ternary_kernels.cuh"
#include "stages/threshold/reach.h"

namespace gradwire::cuda {
namespace {

// Adds up the magnitudes that reach the threshold. They are listed in order, and the i-th of them
// goes to the format's lane i % 16.
class ReachedSum {
 public:
  // `list` has room for a tile.
  __device__ ReachedSum(float threshold, float* list) : threshold_(threshold), list_(list) {}

  // Adds the next `there` values. Warp 0 calls it.
  __device__ void add(const float* values, uint32_t there) {
    uint32_t listed = 0;
    for (uint32_t first = 0; first < there; first += kLanes) {
      const uint32_t at = first + lane();
      const bool reached = at < there && reaches(values[at], threshold_);
      const uint32_t mask = __ballot_sync(kAllLanes, reached);
      const auto before = static_cast<uint32_t>(__popc(mask & ((1u << lane()) - 1)));
      if (reached) list_[listed + before] = float_of(magnitude_bits(values[at]));
      listed += static_cast<uint32_t>(__popc(mask));
    }
    __syncwarp();
    if (lane() < kMomentLanes) {
      for (uint32_t i = (lane() - count_) % kMomentLanes; i < listed; i += kMomentLanes) {
        sum_ += static_cast<double>(list_[i]);
      }
    }
    count_ += listed;
    __syncwarp();
  }

  // Returns the sum to lane 0 of warp 0.
  __device__ PartSums total() const { return {{add_lanes(sum_), 0}, count_}; }

 private:
  float threshold_;
  float* list_;
  double sum_ = 0;
  uint32_t count_ = 0;
};

// Finds the sums of each chunk, and the largest magnitudes.
GW_KERNEL void sum_reached(Segments segments, Encoding encoding, const float* thresholds,
                           PartSums* sums) {
  __shared__ SumTiles tiles;
  __shared__ float list[kTileValues];
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  ReachedSum reached(thresholds[chunk.index], list);
  uint32_t largest = 0;
  stage_part(
      encoding.input, chunk.begin, chunk.n, tiles,
      [&](uint32_t, float b) { largest = max(largest, magnitude_bits(b)); },
      [&](const float* values, uint32_t there) { reached.add(values, there); });
  if (warp() == 0) {
    const PartSums total = reached.total();
    if (lane() == 0) sums[blockIdx.x] = total;
  }
  largest = block_max(largest, shared);
  if (threadIdx.x == 0) raise_segment(chunk, largest, /*several=*/false, encoding.magnitudes);
}

// Finds the mean magnitude of the values sent; each block handles one segment.
GW_KERNEL void find_mean_reached(Segments segments, const PartSums* sums, float* means) {
  __shared__ PartsShared shared;
  const Segment segment = segments.segments[blockIdx.x];
  const PartSums total = add_parts(sums + segment.first_chunk, segment.chunks, shared);
  if (threadIdx.x == 0) means[blockIdx.x] = mean_reached(total.of[0], total.count);
}

// Sparse ternary compression, section IV.
struct StcQuantizer {
  static constexpr bool kDraws = false;

  float density;
  float* thresholds = nullptr;  // of each segment
  float* means = nullptr;       // of each segment
  float threshold = 0;
  float mean = 0;

  void measure(Call& call, const Encoding& encoding) {
    auto* sums = call.take<PartSums>(call.segments.chunks);
    thresholds = call.take<float>(call.segments.count);
    means = call.take<float>(call.segments.count);
    call.launch(find_thresholds, call.segments.count, encoding.input, density, thresholds);
    call.launch(sum_reached, call.segments.chunks, encoding, thresholds, sums);
    call.launch(find_mean_reached, call.segments.count, sums, means);
  }

  __device__ void begin(uint32_t index) {
    threshold = thresholds[index];
    mean = means[index];
  }
  __device__ float scale(uint32_t) const { return mean; }
  __device__ int trit(float b, uint32_t, uint32_t) const { return reached_trit(b, threshold); }
};

}  // namespace

std::unique_ptr<const CodecKernels> kernel_factories::stc(const Codec& codec) {
  const StcParameters& parameters = *parameters_of<StcParameters>(codec);
  return std::make_unique<TernaryKernels<StcQuantizer>>(StcQuantizer{.density = parameters.density},
                                                        parameters.coder);
}

}  // namespace gradwire::cuda
