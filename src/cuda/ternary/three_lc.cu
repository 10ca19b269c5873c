#include "codecs/registry.h"
#include "codecs/three_lc/three_lc.h"
#include "cuda/ternary/ternary_kernels.cuh"

namespace gradwire::cuda {
namespace {

// 3LC, section 3.1.
struct ThreeLcQuantizer {
  static constexpr bool kDraws = false;

  float sparsity;

  static void measure(Call& call, const Encoding& encoding) { measure_magnitudes(call, encoding); }

  __device__ void begin(uint32_t) {}
  __device__ float scale(uint32_t largest) const { return ternary_multiplier(largest, sparsity); }
  __device__ int trit(float b, uint32_t, uint32_t largest) const {
    return ternary_trit(b, scale(largest) * 0.5f);
  }
};

}  // namespace

std::unique_ptr<const CodecKernels> kernel_factories::three_lc(const Codec& codec) {
  const ThreeLcParameters& parameters = *parameters_of<ThreeLcParameters>(codec);
  return std::make_unique<TernaryKernels<ThreeLcQuantizer>>(ThreeLcQuantizer{parameters.sparsity},
                                                            parameters.coder);
}

}  // namespace gradwire::cuda
