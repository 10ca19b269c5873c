#include "cuda/fixed/half.cuh"

namespace gradwire::cuda {
namespace {

struct Bf16 {
  static constexpr uint32_t kRoundsToInfinity = gradwire::kRoundsToInfinity;
  __device__ static uint16_t narrow(float x) { return narrow_bf16(x); }
  __device__ static float widen(uint16_t x) { return widen_bf16(x); }
};

std::unique_ptr<const CodecKernels> create(const Codec&) {
  return std::make_unique<FixedKernels<HalfFormat<Bf16>>>(/*group_size=*/0);
}

}  // namespace

const KernelsFactory kernel_factories::bf16 = create;

}  // namespace gradwire::cuda
