#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "gradwire/status.h"

namespace gradwire::cuda {

// kDeviceError with CUDA's own words.
inline Status to_status(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {StatusCode::kDeviceError, std::string("CUDA: ") + cudaGetErrorString(error)};
}

}  // namespace gradwire::cuda
