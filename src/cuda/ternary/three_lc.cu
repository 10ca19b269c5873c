#include "codecs/registry.h"
#include "codecs/three_lc/three_lc.h"
#include "cuda/ternary/ternary_kernels.cuh"

namespace gradwire::cuda {
namespace {

// 3LC, section 3.1.
struct ThreeLcQuantizer {
  static constexpr bool kDraws = false;

  float sparsity;

  void take_scratch(const Segments&, ScratchLayout&) {}
  [[nodiscard]] static Status measure(const Segments& segments, const Input& input,
                                      const Magnitudes& magnitudes, cudaStream_t stream) {
    return queue_magnitudes(segments, input, magnitudes, stream);
  }

  __device__ void begin(uint32_t) {}
  __device__ float scale(uint32_t largest) const { return ternary_multiplier(largest, sparsity); }
  __device__ int trit(float b, uint32_t, uint32_t largest) const {
    return ternary_trit(b, scale(largest) * 0.5f);
  }
};

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  const ThreeLcParameters parameters = *parameters_of<ThreeLcParameters>(codec);
  return std::make_unique<TernaryKernels<ThreeLcQuantizer>>(
      ThreeLcQuantizer{parameters.sparsity}, parameters.coder, parameters.group_size);
}

}  // namespace

const KernelsFactory kernel_factories::three_lc = create;

}  // namespace gradwire::cuda
