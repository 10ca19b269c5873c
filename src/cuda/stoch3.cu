#include "codecs/stoch3/stoch3.h"
#include "cuda/drawn_ternary.cuh"

namespace gradwire::cuda {
namespace {

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  const Stoch3Parameters parameters = stoch3_parameters(codec).value();
  return std::make_unique<TernaryKernels<DrawnQuantizer>>(DrawnQuantizer{.clip = 0.0f},
                                                          parameters.coder, parameters.bucket);
}

}  // namespace

const KernelsFactory kernel_factories::stoch3 = create;

}  // namespace gradwire::cuda
