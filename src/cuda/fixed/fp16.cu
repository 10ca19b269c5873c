#include "cuda/fixed/half.cuh"

namespace gradwire::cuda {
namespace {

struct Fp16 {
  static constexpr uint32_t kRoundsToInfinity = kF16RoundsToInfinity;
  __device__ static uint16_t narrow(float x) { return narrow_f16(x); }
  __device__ static float widen(uint16_t x) { return widen_f16(x); }
};

std::unique_ptr<const CodecKernels> create(const Codec&) {
  return std::make_unique<FixedKernels<HalfFormat<Fp16>>>(/*group_size=*/0);
}

}  // namespace

const KernelsFactory kernel_factories::fp16 = create;

}  // namespace gradwire::cuda
