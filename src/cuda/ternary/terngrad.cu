#include "codecs/registry.h"
#include "codecs/terngrad/terngrad.h"
#include "cuda/ternary/drawn_ternary.cuh"

namespace gradwire::cuda {
namespace {

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  const TernGradParameters parameters = *parameters_of<TernGradParameters>(codec);
  return std::make_unique<TernaryKernels<DrawnQuantizer>>(DrawnQuantizer{.clip = parameters.clip},
                                                          parameters.coder, parameters.group_size);
}

}  // namespace

const KernelsFactory kernel_factories::terngrad = create;

}  // namespace gradwire::cuda
