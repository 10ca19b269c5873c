#include "codecs/input.h"

#include <algorithm>
#include <cstring>

#include "stages/element.h"

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

float sum_of(const InputView& x, const ResidualView& residual, uint64_t i) {
  switch (residual.type()) {
    case ResidualType::kNone:
      return value_of(x, i);
    case ResidualType::kFloat32:
      return value_of(x, i) + residual.f32()[i];
    case ResidualType::kBfloat16:
      return value_of(x, i) + widen_bf16(residual.bf16()[i]);
  }
  return 0.0f;
}

const float* Input::load(uint64_t begin, uint64_t n, float* buffer) const {
  const bool is_f32 = x_.dtype() == Dtype::kFloat32;
  if (is_f32 && !keeps_residual()) return x_.f32() + begin;
  if (is_f32 && residual_.type() == ResidualType::kFloat32) {
    kernels_->sum(x_.f32() + begin, residual_.f32() + begin, n, buffer);
    return buffer;
  }
  switch (x_.dtype()) {
    case Dtype::kFloat32:
      std::copy_n(x_.f32() + begin, n, buffer);
      break;
    case Dtype::kBfloat16:
      kernels_->widen_bf16(x_.u16() + begin, n, buffer);
      break;
    case Dtype::kFloat16:
      kernels_->widen_f16(x_.u16() + begin, n, buffer);
      break;
  }
  switch (residual_.type()) {
    case ResidualType::kNone:
      break;
    case ResidualType::kFloat32:
      kernels_->add_f32(residual_.f32() + begin, n, buffer);
      break;
    case ResidualType::kBfloat16:
      kernels_->widen_add_bf16(residual_.bf16() + begin, n, buffer);
      break;
  }
  return buffer;
}

void Input::keep(uint64_t begin, uint64_t n, const float* b, float* decoded) const {
  switch (residual_.type()) {
    case ResidualType::kNone:
      break;
    case ResidualType::kFloat32:
      kernels_->subtract(b, decoded, n, residual_.f32() + begin);
      break;
    case ResidualType::kBfloat16:
      kernels_->subtract(b, decoded, n, decoded);
      store(begin, n, decoded);
      break;
  }
}

void Input::store(uint64_t begin, uint64_t n, const float* left) const {
  switch (residual_.type()) {
    case ResidualType::kNone:
      break;
    case ResidualType::kFloat32:
      std::memcpy(residual_.f32() + begin, left, n * sizeof(float));
      break;
    case ResidualType::kBfloat16:
      kernels_->narrow_bf16(left, n, residual_.bf16() + begin);
      break;
  }
}

void Input::store(uint64_t i, float left) const {
  switch (residual_.type()) {
    case ResidualType::kNone:
      break;
    case ResidualType::kFloat32:
      residual_.f32()[i] = left;
      break;
    case ResidualType::kBfloat16:
      residual_.bf16()[i] = narrow_bf16(left);
      break;
  }
}

uint32_t Input::absmax(uint64_t begin, uint64_t n) const {
  uint32_t largest = 0;
  const auto raise = [&largest](uint32_t magnitude) { largest = std::max(largest, magnitude); };
  with_residual(
      begin, n,
      [&](uint64_t, uint64_t count, const float* x) { raise(kernels_->absmax(x, count)); },
      [&](uint64_t, uint64_t count, const float* x, const float* r) {
        raise(kernels_->absmax_f32(x, r, count));
      },
      [&](uint64_t, uint64_t count, const float* x, const uint16_t* r) {
        raise(kernels_->absmax_bf16(x, r, count));
      });
  return largest;
}

}  // namespace gradwire
