#include "cuda/common/block.cuh"
#include "cuda/common/input.cuh"
#include "cuda/shards/shard_values.h"
#include "stages/element/float_bits.h"

namespace gradwire::cuda {
namespace {

constexpr uint64_t kBlockValues = uint64_t{kUnrolled} * kThreads;

uint64_t blocks_of(uint64_t n) { return (n + kBlockValues - 1) / kBlockValues; }

// Calls body(i) for the values of this block.
template <typename Body>
__device__ void for_each_of_block(uint64_t n, const Body& body) {
  const uint64_t first = blockIdx.x * kBlockValues + threadIdx.x;
#pragma unroll
  for (uint32_t i = 0; i < kUnrolled; ++i) {
    if (first + i * kThreads < n) body(first + i * kThreads);
  }
}

__device__ float load(const ResidualValues& residual, uint64_t i) {
  return residual.type == ResidualType::kFloat32
             ? static_cast<const float*>(residual.values)[i]
             : widen_bf16(static_cast<const uint16_t*>(residual.values)[i]);
}

__device__ void store(const ResidualValues& residual, uint64_t i, float value) {
  if (residual.type == ResidualType::kFloat32) {
    static_cast<float*>(residual.values)[i] = value;
  } else {
    static_cast<uint16_t*>(residual.values)[i] = narrow_bf16(value);
  }
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    find_non_finite(const float* values, uint64_t n, uint64_t* first) {
  for_each_of_block(n, [&](uint64_t i) {
    if (magnitude_bits(values[i]) < kNonFiniteBits) return;
    atomicMin(reinterpret_cast<unsigned long long*>(first), static_cast<unsigned long long>(i));
  });
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    divide_run(float* values, uint64_t n, float divisor) {
  for_each_of_block(n, [&](uint64_t i) { values[i] /= divisor; });
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks) fill_nan(float* values, uint64_t n) {
  for_each_of_block(n, [&](uint64_t i) { values[i] = float_of(0x7fc00000u); });
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    add_to_residual(ResidualValues residual, const float* values, uint64_t n, float factor) {
  for_each_of_block(
      n, [&](uint64_t i) { store(residual, i, load(residual, i) + factor * values[i]); });
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    scale_residual(ResidualValues residual, uint64_t n, float factor) {
  for_each_of_block(n, [&](uint64_t i) { store(residual, i, load(residual, i) * factor); });
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    pay(ResidualValues residual, float* values, uint64_t n) {
  for_each_of_block(n, [&](uint64_t i) { values[i] += load(residual, i); });
}

// ValueAt: of the i-th value whose square is added.
template <typename ValueAt>
__device__ void add_squares_of_block(uint64_t n, double* sum, const ValueAt& value_at) {
  __shared__ double of_warp[kWarps];
  double own = 0;
  for_each_of_block(n, [&](uint64_t i) {
    const double value = value_at(i);
    own += value * value;
  });
  for (unsigned step = kLanes / 2; step > 0; step /= 2) {
    own += __shfl_xor_sync(kAllLanes, own, static_cast<int>(step));
  }
  if (lane() == 0) of_warp[warp()] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned i = 1; i < kWarps; ++i) own += of_warp[i];
  atomicAdd(sum, own);
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    add_squares(const float* a, const float* b, uint64_t n, double* sum) {
  add_squares_of_block(n, sum, [&](uint64_t i) {
    return static_cast<double>(a[i]) - (b == nullptr ? 0.0 : static_cast<double>(b[i]));
  });
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    add_residual_squares(ResidualValues residual, uint64_t n, double* sum) {
  add_squares_of_block(n, sum, [&](uint64_t i) { return load(residual, i); });
}

}  // namespace

Status queue_find_non_finite(const float* values, uint64_t n, uint64_t* first,
                             cudaStream_t stream) {
  return launch(find_non_finite, blocks_of(n), stream, values, n, first);
}

Status queue_divide(float* values, uint64_t n, float divisor, cudaStream_t stream) {
  return launch(divide_run, blocks_of(n), stream, values, n, divisor);
}

Status queue_fill_nan(float* values, uint64_t n, cudaStream_t stream) {
  return launch(fill_nan, blocks_of(n), stream, values, n);
}

Status queue_add_to_residual(ResidualValues residual, const float* values, uint64_t n, float factor,
                             cudaStream_t stream) {
  return launch(add_to_residual, blocks_of(n), stream, residual, values, n, factor);
}

Status queue_scale_residual(ResidualValues residual, uint64_t n, float factor,
                            cudaStream_t stream) {
  return launch(scale_residual, blocks_of(n), stream, residual, n, factor);
}

Status queue_pay(ResidualValues residual, float* values, uint64_t n, cudaStream_t stream) {
  return launch(pay, blocks_of(n), stream, residual, values, n);
}

Status queue_add_squares(const float* a, const float* b, uint64_t n, double* sum,
                         cudaStream_t stream) {
  return launch(add_squares, blocks_of(n), stream, a, b, n, sum);
}

Status queue_add_squares(ResidualValues residual, uint64_t n, double* sum, cudaStream_t stream) {
  return launch(add_residual_squares, blocks_of(n), stream, residual, n, sum);
}

}  // namespace gradwire::cuda
