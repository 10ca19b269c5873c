#include "codecs/terngrad/terngrad.h"
#include "cuda/drawn_ternary.cuh"

namespace gradwire::cuda {
namespace {

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  const TernGradParameters parameters = terngrad_parameters(codec).value();
  return std::make_unique<TernaryKernels<DrawnQuantizer>>(DrawnQuantizer{.clip = parameters.clip},
                                                          parameters.coder, parameters.bucket);
}

}  // namespace

const KernelsFactory kernel_factories::terngrad = create;

}  // namespace gradwire::cuda
