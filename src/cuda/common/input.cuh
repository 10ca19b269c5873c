#pragma once

// Reads b = x + residual, and stores the new residual. Neighbouring threads handle neighbouring
// values, so memory is read in whole lines at any address that suits the type. The types are tested
// once for several values. They are no template parameters, so one kernel serves all nine pairs.

#include <cstdint>

#include "cuda/common/launch.h"
#include "gradwire/cuda.h"
#include "stages/element/bfloat16.h"
#include "stages/half/float16.h"

namespace gradwire::cuda {

// A thread loads so many values before it uses one of them.
inline constexpr uint32_t kUnrolled = 8;

// Whether all of a thread's values, kStride apart from `base` on, are before n. Then they need one
// address and no comparisons, which would take more instructions than the rest of a first pass.
template <uint32_t kStride>
__device__ bool all_before(uint32_t base, uint32_t n) {
  return base + (kUnrolled - 1) * kStride < n;
}

// Loads all of a thread's values before one is used; values from n on are 0.
template <uint32_t kStride, typename T>
__device__ void load_values(const T* from, uint32_t base, uint32_t n, T (&values)[kUnrolled]) {
  from += base;
  if (all_before<kStride>(base, n)) {
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) values[i] = from[i * kStride];
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      values[i] = base + i * kStride < n ? from[i * kStride] : T{};
    }
  }
}

// The values of a residual, in device memory.
struct ResidualValues {
  ResidualType type;
  void* values;

  // Only where the type is not kNone.
  __device__ float load(uint64_t i) const {
    return type == ResidualType::kFloat32 ? static_cast<const float*>(values)[i]
                                          : widen_bf16(static_cast<const uint16_t*>(values)[i]);
  }
  __device__ void store(uint64_t i, float value) const {
    if (type == ResidualType::kFloat32) {
      static_cast<float*>(values)[i] = value;
    } else {
      static_cast<uint16_t*>(values)[i] = narrow_bf16_finite(value);
    }
  }
};

class Input {
 public:
  explicit Input(const EncodeArguments& arguments)
      : dtype_(arguments.dtype),
        x_(arguments.x_dev),
        residual_{arguments.residual_type, arguments.residual_dev} {}

  [[nodiscard]] GW_HOST_DEVICE bool keeps_residual() const {
    return residual_.type != ResidualType::kNone;
  }

  // Calls body(at, b) for the n values from `begin` on, all lanes of a warp together: `at` counts
  // from `begin`; lanes after the end have at >= n and b = 0.
  template <typename Body>
  __device__ void for_each(uint64_t begin, uint32_t n, const Body& body) const {
    for_each_row(begin, n, [&](uint32_t base, const Values& b) {
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) body(base + i * kThreads, b[i]);
    });
  }

  // x + residual of one value.
  __device__ float at(uint64_t index) const {
    const float x = dtype_ == Dtype::kFloat32 ? static_cast<const float*>(x_)[index]
                    : dtype_ == Dtype::kBfloat16
                        ? widen_bf16(static_cast<const uint16_t*>(x_)[index])
                        : widen_f16(static_cast<const uint16_t*>(x_)[index]);
    return keeps_residual() ? x + residual_.load(index) : x;
  }

  // Calls before(at) for the first of kUnrolled values that a thread has loaded, kThreads apart,
  // and then body(i, at, b) for the i-th of them. The result of body becomes the residual, if one
  // is kept.
  template <typename Before, typename Body>
  __device__ void replace(uint64_t begin, uint32_t n, const Before& before,
                          const Body& body) const {
    for_each_row(begin, n, [&](uint32_t base, Values& b) {
      before(base);
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) b[i] = body(i, base + i * kThreads, b[i]);
      keep(begin, base, n, b, kAllValues);
    });
  }

  // Calls body(i, at, b) in the same way; if it returns true, b becomes the residual.
  template <typename Body>
  __device__ void keep_some(uint64_t begin, uint32_t n, const Body& body) const {
    for_each_row(begin, n, [&](uint32_t base, const Values& b) {
      uint32_t kept = 0;
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) {
        kept |= static_cast<uint32_t>(body(i, base + i * kThreads, b[i])) << i;
      }
      keep(begin, base, n, b, kept);
    });
  }

  // Stores the residual of one value, if one is kept.
  __device__ void store(uint64_t index, float left) const {
    if (keeps_residual()) residual_.store(index, left);
  }

  using Values = float[kUnrolled];

  // Loads the values of a thread, kStride apart from `base` on; values from n on are 0.
  template <uint32_t kStride = kThreads>
  __device__ void load(uint64_t begin, uint32_t base, uint32_t n, Values& b) const {
    if (dtype_ == Dtype::kFloat32) {
      load_values<kStride>(static_cast<const float*>(x_) + begin, base, n, b);
    } else {
      uint16_t x[kUnrolled];
      load_values<kStride>(static_cast<const uint16_t*>(x_) + begin, base, n, x);
      const bool bf16 = dtype_ == Dtype::kBfloat16;
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) b[i] = bf16 ? widen_bf16(x[i]) : widen_f16(x[i]);
    }
    if (residual_.type == ResidualType::kFloat32) {
      float r[kUnrolled];
      load_values<kStride>(static_cast<const float*>(residual_.values) + begin, base, n, r);
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) b[i] = b[i] + r[i];
    } else if (residual_.type == ResidualType::kBfloat16) {
      uint16_t r[kUnrolled];
      load_values<kStride>(static_cast<const uint16_t*>(residual_.values) + begin, base, n, r);
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) b[i] = b[i] + widen_bf16(r[i]);
    }
  }

 private:
  // Calls body(base, b) with the kUnrolled values of each thread, kThreads apart from `base` on.
  template <typename Body>
  __device__ void for_each_row(uint64_t begin, uint32_t n, const Body& body) const {
    for (uint32_t base = threadIdx.x; base - threadIdx.x < n; base += kUnrolled * kThreads) {
      Values b;
      load(begin, base, n, b);
      body(base, b);
    }
  }

  static constexpr uint32_t kAllValues = (1u << kUnrolled) - 1;

  // `which`: bit i where the i-th value is written.
  template <typename T>
  __device__ static void write(T* to, uint32_t base, uint32_t n, const T (&values)[kUnrolled],
                               uint32_t which) {
    to += base;
    if (which == kAllValues && all_before<kThreads>(base, n)) {
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) to[i * kThreads] = values[i];
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) {
        if (base + i * kThreads < n && (which >> i & 1) != 0) to[i * kThreads] = values[i];
      }
    }
  }

  __device__ void keep(uint64_t begin, uint32_t base, uint32_t n, const Values& left,
                       uint32_t which) const {
    if (residual_.type == ResidualType::kFloat32) {
      write(static_cast<float*>(residual_.values) + begin, base, n, left, which);
    } else if (residual_.type == ResidualType::kBfloat16) {
      uint16_t halves[kUnrolled];
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) halves[i] = narrow_bf16_finite(left[i]);
      write(static_cast<uint16_t*>(residual_.values) + begin, base, n, halves, which);
    }
  }

  Dtype dtype_;
  const void* x_;
  ResidualValues residual_;
};

}  // namespace gradwire::cuda
