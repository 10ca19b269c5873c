#pragma once

// The work of a shard codec on values and residuals apart from encoding and decoding: kernels for n
// values, of blocks_of(n) blocks.

#include <cstdint>

#include "cuda/common/block.cuh"
#include "cuda/common/input.cuh"
#include "stages/element/float_bits.h"

namespace gradwire::cuda {

inline constexpr uint64_t kBlockValues = uint64_t{kUnrolled} * kThreads;

inline uint64_t blocks_of(uint64_t n) { return (n + kBlockValues - 1) / kBlockValues; }

// Calls body(i) for the values of this block.
template <typename Body>
__device__ void for_each_of_block(uint64_t n, const Body& body) {
  const uint64_t first = blockIdx.x * kBlockValues + threadIdx.x;
#pragma unroll
  for (uint32_t i = 0; i < kUnrolled; ++i) {
    if (first + i * kThreads < n) body(first + i * kThreads);
  }
}

// Lowers *first to the index of the first NaN or Inf, if there is one that is smaller.
static GW_KERNEL void find_non_finite(uint64_t n, const float* values, uint64_t* first) {
  for_each_of_block(n, [&](uint64_t i) {
    if (magnitude_bits(values[i]) < kNonFiniteBits) return;
    atomicMin(reinterpret_cast<unsigned long long*>(first), static_cast<unsigned long long>(i));
  });
}

static GW_KERNEL void divide_run(uint64_t n, float* values, float divisor) {
  for_each_of_block(n, [&](uint64_t i) { values[i] /= divisor; });
}

static GW_KERNEL void fill_with(uint64_t n, float* values, float value) {
  for_each_of_block(n, [&](uint64_t i) { values[i] = value; });
}

static GW_KERNEL void add_values(uint64_t n, ResidualValues residual, const float* values,
                                 float factor) {
  for_each_of_block(n,
                    [&](uint64_t i) { residual.store(i, residual.load(i) + factor * values[i]); });
}

static GW_KERNEL void scale_residual(uint64_t n, ResidualValues residual, float factor) {
  for_each_of_block(n, [&](uint64_t i) { residual.store(i, residual.load(i) * factor); });
}

static GW_KERNEL void pay(uint64_t n, ResidualValues residual, float* values) {
  for_each_of_block(n, [&](uint64_t i) { values[i] += residual.load(i); });
}

// Adds the squares of a[i] - b[i] to *sum; b = nullptr stands for zeros.
static GW_KERNEL void add_squares(uint64_t n, ResidualValues a, const float* b, double* sum) {
  __shared__ double of_warp[kWarps];
  double own = 0;
  for_each_of_block(n, [&](uint64_t i) {
    const double value =
        static_cast<double>(a.load(i)) - (b == nullptr ? 0.0 : static_cast<double>(b[i]));
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

}  // namespace gradwire::cuda
