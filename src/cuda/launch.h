#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "gradwire/status.h"

namespace gradwire::cuda {

// Threads of a block, of every kernel here.
inline constexpr unsigned kThreads = 256;
// Blocks that a multiprocessor holds at least: a thread may take 64 registers. With a looser bound
// nvcc 13 aims for more blocks, and spills.
inline constexpr unsigned kResidentBlocks = 4;
inline constexpr unsigned kLanes = 32;
inline constexpr unsigned kWarps = kThreads / kLanes;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// The same value, of which the compiler knows nothing. So what depends on it is worked out anew in
// each turn of a loop, where it would else take a register throughout, or be spilled.
__device__ inline uint32_t worked_out_anew(uint32_t value) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// In a loop that waits for another block.
#ifdef __CUDACC__
__device__ inline void wait_a_little() {}
#else
inline void wait_a_little() { on_host::wait(); }
#endif

// Blocks for so many threads.
inline uint64_t blocks_for(uint64_t threads) { return (threads + kThreads - 1) / kThreads; }

inline constexpr uint64_t kMostBlocks = INT32_MAX;

// Queues a kernel of `blocks` blocks; none are fine. kDeviceError with CUDA's own words if the
// launch is refused. An error that the caller has left behind is not taken for one of the launch,
// and the launch leaves none.
template <typename... Parameters, typename... Arguments>
Status launch(void (*kernel)(Parameters...), uint64_t blocks, cudaStream_t stream,
              Arguments... arguments) {
  if (blocks == 0) return {};
  if (blocks > kMostBlocks) return {StatusCode::kDeviceError, "CUDA: more than 2^31 - 1 blocks"};
#ifdef __CUDACC__
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {StatusCode::kDeviceError, std::string("CUDA: ") + cudaGetErrorString(error)};
  }
#else
  static_cast<void>(stream);
  on_host::launch(static_cast<unsigned>(blocks), kThreads, [&] { kernel(arguments...); });
#endif
  return {};
}

}  // namespace gradwire::cuda
