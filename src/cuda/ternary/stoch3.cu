#include "codecs/registry.h"
#include "codecs/stoch3/stoch3.h"
#include "cuda/ternary/drawn_ternary.cuh"

namespace gradwire::cuda {
namespace {

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  const Stoch3Parameters parameters = *parameters_of<Stoch3Parameters>(codec);
  return std::make_unique<TernaryKernels<DrawnQuantizer>>(DrawnQuantizer{.clip = 0.0f},
                                                          parameters.coder, parameters.group_size);
}

}  // namespace

const KernelsFactory kernel_factories::stoch3 = create;

}  // namespace gradwire::cuda
