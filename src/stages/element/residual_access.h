#pragma once

// Access to the residuals of error feedback, for loops over elements: add() returns b = x + r for
// element i, set() stores the new residual.

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "stages/element/bfloat16.h"

namespace gradwire {

// The residuals of the values that a kernel is given: none, float32 or bfloat16.
struct ResidualValues {
  float* f32 = nullptr;
  uint16_t* bf16 = nullptr;

  ResidualValues() = default;
  ResidualValues(float* values) : f32(values) {}
  ResidualValues(uint16_t* values) : bf16(values) {}

  // The residuals of the values from i on.
  [[nodiscard]] ResidualValues from(size_t i) const {
    if (f32 != nullptr) return f32 + i;
    return bf16 != nullptr ? ResidualValues(bf16 + i) : ResidualValues();
  }
};

struct NoResidual {
  GW_HOST_DEVICE float add(float x, size_t) const { return x; }
  GW_HOST_DEVICE void set(float, size_t) const {}
};

GW_HOST_DEVICE inline float residual_value(float r) { return r; }
GW_HOST_DEVICE inline float residual_value(uint16_t r) { return widen_bf16(r); }
GW_HOST_DEVICE inline void keep_residual(float left, float* r) { *r = left; }
GW_HOST_DEVICE inline void keep_residual(float left, uint16_t* r) { *r = narrow_bf16_finite(left); }

// T: float, or uint16_t for bfloat16.
template <typename T>
struct ResidualOf {
  T* r;
  GW_HOST_DEVICE explicit ResidualOf(T* residual) : r(residual) {}
  GW_HOST_DEVICE float add(float x, size_t i) const { return x + residual_value(r[i]); }
  GW_HOST_DEVICE void set(float left, size_t i) const { keep_residual(left, r + i); }
};

namespace scalar {

// Calls body with the NoResidual or ResidualOf that `r` stands for.
template <class Body>
auto with_residual(ResidualValues r, const Body& body) {
  if (r.f32 != nullptr) return body(ResidualOf(r.f32));
  if (r.bf16 != nullptr) return body(ResidualOf(r.bf16));
  return body(NoResidual());
}

}  // namespace scalar

}  // namespace gradwire
