#pragma once

// What a shard codec does with values and residuals beside encoding and decoding. All pointers are
// the device's; each function queues a kernel.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gradwire/codec.h"
#include "gradwire/status.h"

namespace gradwire::cuda {

// Lowers *first to the index of the first NaN or Inf, if there is one that is smaller.
Status queue_find_non_finite(const float* values, uint64_t n, uint64_t* first, cudaStream_t stream);
Status queue_divide(float* values, uint64_t n, float divisor, cudaStream_t stream);
Status queue_fill_nan(float* values, uint64_t n, cudaStream_t stream);

// Values of a residual, of `type` kFloat32 or kBfloat16.
struct ResidualValues {
  ResidualType type;
  void* values;
};

// residual[i] += factor * values[i]
Status queue_add_to_residual(ResidualValues residual, const float* values, uint64_t n, float factor,
                             cudaStream_t stream);
Status queue_scale_residual(ResidualValues residual, uint64_t n, float factor, cudaStream_t stream);
// values[i] += residual[i]
Status queue_pay(ResidualValues residual, float* values, uint64_t n, cudaStream_t stream);

// Adds the squares of a[i] - b[i] to *sum; nullptr: b is 0.
Status queue_add_squares(const float* a, const float* b, uint64_t n, double* sum,
                         cudaStream_t stream);
Status queue_add_squares(ResidualValues residual, uint64_t n, double* sum, cudaStream_t stream);

}  // namespace gradwire::cuda
