#pragma once

// b = x + residual, and what is left of b. Neighbouring threads take neighbouring values, so that
// memory is read in whole lines at any address that suits the type. Types are told apart once for
// several values, not by templates: one kernel serves all nine pairs.

#include <cstdint>

#include "cuda/launch.h"
#include "gradwire/cuda.h"
#include "stages/element.h"

namespace gradwire::cuda {

// Values that a thread has under way at once.
inline constexpr uint32_t kUnrolled = 8;

class Input {
 public:
  explicit Input(const EncodeArguments& arguments)
      : dtype_(arguments.dtype),
        residual_type_(arguments.residual_type),
        x_(arguments.x_dev),
        residual_(arguments.residual_dev) {}

  [[nodiscard]] GW_HOST_DEVICE bool keeps_residual() const {
    return residual_type_ != ResidualType::kNone;
  }

  // Calls body(at, b) for the n values from `begin` on, all lanes of a warp together: `at` counts
  // from `begin`; lanes behind the end have at >= n and b = 0.
  template <typename Body>
  __device__ void for_each(uint64_t begin, uint32_t n, const Body& body) const {
    for (uint32_t base = threadIdx.x; base - threadIdx.x < n; base += kUnrolled * kThreads) {
      float b[kUnrolled];
      load(begin, base, n, b);
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) body(base + i * kThreads, b[i]);
    }
  }

  // x + residual of one value.
  __device__ float at(uint64_t index) const {
    const float x = dtype_ == Dtype::kFloat32 ? static_cast<const float*>(x_)[index]
                    : dtype_ == Dtype::kBfloat16
                        ? widen_bf16(static_cast<const uint16_t*>(x_)[index])
                        : widen_f16(static_cast<const uint16_t*>(x_)[index]);
    switch (residual_type_) {
      case ResidualType::kNone:
        return x;
      case ResidualType::kFloat32:
        return x + static_cast<const float*>(residual_)[index];
      case ResidualType::kBfloat16:
        return x + widen_bf16(static_cast<const uint16_t*>(residual_)[index]);
    }
    return x;
  }

  // Calls before(at) for the first of kUnrolled values that a thread has under way, the others
  // kThreads apart, and then body(i, at, b) for the i-th of them. What body returns is the new
  // residual, where one is kept.
  template <typename Before, typename Body>
  __device__ void replace(uint64_t begin, uint32_t n, const Before& before,
                          const Body& body) const {
    for (uint32_t base = threadIdx.x; base - threadIdx.x < n; base += kUnrolled * kThreads) {
      float b[kUnrolled];
      load(begin, base, n, b);
      before(base);
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) b[i] = body(i, base + i * kThreads, b[i]);
      keep(begin, base, n, b, kAllValues);
    }
  }

  // Calls body(i, at, b) likewise; where it returns true, b becomes the residual.
  template <typename Body>
  __device__ void keep_some(uint64_t begin, uint32_t n, const Body& body) const {
    for (uint32_t base = threadIdx.x; base - threadIdx.x < n; base += kUnrolled * kThreads) {
      float b[kUnrolled];
      load(begin, base, n, b);
      uint32_t kept = 0;
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) {
        kept |= static_cast<uint32_t>(body(i, base + i * kThreads, b[i])) << i;
      }
      keep(begin, base, n, b, kept);
    }
  }

  // The residual of one value, where one is kept.
  __device__ void store(uint64_t index, float left) const {
    if (residual_type_ == ResidualType::kFloat32) static_cast<float*>(residual_)[index] = left;
    if (residual_type_ == ResidualType::kBfloat16) {
      static_cast<uint16_t*>(residual_)[index] = narrow_bf16(left);
    }
  }

  using Values = float[kUnrolled];

  // The values of a thread, kStride apart from `base` on; 0 from n on.
  template <uint32_t kStride = kThreads>
  __device__ void load(uint64_t begin, uint32_t base, uint32_t n, Values& b) const {
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) b[i] = 0.0f;
    if (dtype_ == Dtype::kFloat32) {
      const auto* x = static_cast<const float*>(x_);
      for_each_there<kStride>(begin, base, n, [&](uint32_t i, uint64_t index) { b[i] = x[index]; });
    } else {
      const auto* x = static_cast<const uint16_t*>(x_);
      const bool bf16 = dtype_ == Dtype::kBfloat16;
      for_each_there<kStride>(begin, base, n, [&](uint32_t i, uint64_t index) {
        b[i] = bf16 ? widen_bf16(x[index]) : widen_f16(x[index]);
      });
    }
    if (residual_type_ == ResidualType::kFloat32) {
      const auto* r = static_cast<const float*>(residual_);
      for_each_there<kStride>(begin, base, n,
                              [&](uint32_t i, uint64_t index) { b[i] = b[i] + r[index]; });
    } else if (residual_type_ == ResidualType::kBfloat16) {
      const auto* r = static_cast<const uint16_t*>(residual_);
      for_each_there<kStride>(
          begin, base, n, [&](uint32_t i, uint64_t index) { b[i] = b[i] + widen_bf16(r[index]); });
    }
  }

 private:
  static constexpr uint32_t kAllValues = (1u << kUnrolled) - 1;

  // Calls one(i, index) for those of a thread's values that are there.
  template <uint32_t kStride, typename One>
  __device__ static void for_each_there(uint64_t begin, uint32_t base, uint32_t n, const One& one) {
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      const uint32_t at = base + i * kStride;
      if (at < n) one(i, begin + at);
    }
  }

  // `which`: bit i where the i-th value is kept.
  __device__ void keep(uint64_t begin, uint32_t base, uint32_t n, const Values& left,
                       uint32_t which) const {
    if (residual_type_ == ResidualType::kFloat32) {
      auto* r = static_cast<float*>(residual_);
      for_each_there<kThreads>(begin, base, n, [&](uint32_t i, uint64_t index) {
        if ((which >> i & 1) != 0) r[index] = left[i];
      });
    } else if (residual_type_ == ResidualType::kBfloat16) {
      auto* r = static_cast<uint16_t*>(residual_);
      for_each_there<kThreads>(begin, base, n, [&](uint32_t i, uint64_t index) {
        if ((which >> i & 1) != 0) r[index] = narrow_bf16(left[i]);
      });
    }
  }

  Dtype dtype_;
  ResidualType residual_type_;
  const void* x_;
  void* residual_;
};

}  // namespace gradwire::cuda
