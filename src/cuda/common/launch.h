#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/cuda_status.h"

namespace gradwire::cuda {

// Every kernel here has blocks of so many threads.
inline constexpr unsigned kThreads = 256;
// A multiprocessor holds at least so many blocks, so a thread may take 64 registers. With a looser
// bound nvcc 13 aims for more blocks, and spills registers.
inline constexpr unsigned kResidentBlocks = 4;
inline constexpr unsigned kLanes = 32;
inline constexpr unsigned kWarps = kThreads / kLanes;
inline constexpr unsigned kAllLanes = 0xffffffffu;

#define GW_KERNEL __global__ __launch_bounds__(kThreads, kResidentBlocks)

// The number of this thread among all threads of the kernel.
__device__ inline uint64_t thread_number() {
  return static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

// Returns the value, and hides from the compiler that it is the same. So expressions of it are
// computed again in each turn of a loop; otherwise they would occupy registers, or be spilled.
__device__ inline uint32_t worked_out_anew(uint32_t value) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// Called in a loop that waits for another block.
#ifdef __CUDACC__
__device__ inline void wait_a_little() {}
#else
inline void wait_a_little() { on_host::wait(); }
#endif

// How many blocks hold so many threads.
inline uint64_t blocks_for(uint64_t threads) { return (threads + kThreads - 1) / kThreads; }

inline constexpr uint64_t kMostBlocks = INT32_MAX;

// Queues a kernel of `blocks` blocks; of 0 blocks, it does nothing. kDeviceError if the launch is
// refused. An earlier error of the caller's is not reported here, and an error of the launch is not
// left for the caller's next check.
template <typename... Parameters, typename... Arguments>
Status launch(void (*kernel)(Parameters...), uint64_t blocks, cudaStream_t stream,
              const Arguments&... arguments) {
  if (blocks == 0) return {};
  if (blocks > kMostBlocks) return {StatusCode::kDeviceError, "CUDA: more than 2^31 - 1 blocks"};
#ifdef __CUDACC__
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return to_status(error);
#else
  static_cast<void>(stream);
  on_host::launch(static_cast<unsigned>(blocks), kThreads, [&] { kernel(arguments...); });
  return {};
#endif
}

}  // namespace gradwire::cuda
