#include "codecs/input.h"

#include <algorithm>

#include "stages/element/bfloat16.h"
#include "stages/half/float16.h"

namespace gradwire {

float value_of(const InputView& x, uint64_t i) {
  switch (x.dtype()) {
    case Dtype::kFloat32:
      return x.f32()[i];
    case Dtype::kBfloat16:
      return widen_bf16(x.u16()[i]);
    case Dtype::kFloat16:
      return widen_f16(x.u16()[i]);
  }
  return 0.0f;
}

ResidualValues Input::residual_from(uint64_t begin) const {
  if (residual_.type() == ResidualType::kFloat32) return residual_.f32() + begin;
  if (residual_.type() == ResidualType::kBfloat16) return residual_.bf16() + begin;
  return {};
}

float Input::at(uint64_t i) const {
  return scalar::with_residual(residual_from(i), [&](auto r) { return r.add(value_of(x_, i), 0); });
}

const float* Input::widen(uint64_t begin, uint64_t n, float* buffer) const {
  if (is_f32()) return x_.f32() + begin;
  const auto widen = x_.dtype() == Dtype::kBfloat16 ? kernels_->widen_bf16 : kernels_->widen_f16;
  widen(x_.u16() + begin, n, buffer, DecodeMode::kStore);
  return buffer;
}

const float* Input::load(uint64_t begin, uint64_t n, float* buffer) const {
  const float* x = widen(begin, n, buffer);
  if (residual_.type() == ResidualType::kFloat32) {
    kernels_->sum(x, residual_.f32() + begin, n, buffer);
  } else if (residual_.type() == ResidualType::kBfloat16) {
    if (is_f32()) std::copy_n(x, n, buffer);
    kernels_->widen_bf16(residual_.bf16() + begin, n, buffer, DecodeMode::kAdd);
  }
  return keeps_residual() ? buffer : x;
}

void Input::keep(uint64_t begin, uint64_t n, const float* b, float* decoded) const {
  const ResidualValues r = residual_from(begin);
  kernels_->subtract(b, decoded, n, r.f32 != nullptr ? r.f32 : decoded);
  if (r.bf16 != nullptr) kernels_->narrow_bf16_finite(decoded, n, r.bf16);
}

void Input::store(uint64_t begin, uint64_t n, const float* left) const {
  const ResidualValues r = residual_from(begin);
  if (r.f32 != nullptr) std::copy_n(left, n, r.f32);
  if (r.bf16 != nullptr) kernels_->narrow_bf16_finite(left, n, r.bf16);
}

void Input::store(uint64_t i, float left) const {
  scalar::with_residual(residual_from(i), [=](auto r) { r.set(left, 0); });
}

void Input::restore(uint64_t begin, uint64_t n, const float* decoded) const {
  scalar::with_residual(residual_from(begin), [&](auto r) {
    for (uint64_t i = 0; i < n; ++i) r.set(r.add(decoded[i], i) - value_of(x_, begin + i), i);
  });
}

uint32_t Input::absmax(uint64_t begin, uint64_t n) const {
  uint32_t largest = 0;
  with_residual(begin, n, [&](uint64_t, uint64_t count, const float* x, ResidualValues r) {
    largest = std::max(largest, kernels_->absmax(x, r, count));
  });
  return largest;
}

}  // namespace gradwire
