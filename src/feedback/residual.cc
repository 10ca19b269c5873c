#include "gradwire/residual.h"

#include "base/huge_pages.h"
#include "base/standard_arithmetic.h"
#include "stages/element/bfloat16.h"

namespace gradwire {

Residual::Residual(ResidualType type, uint64_t n) : type_(type) {
  const auto fill = [n](auto& values) {
    values.reserve(n);
    advise_huge_pages(values.data(), n * sizeof(values[0]));
    values.resize(n);
  };
  if (type == ResidualType::kFloat32) fill(f32_);
  if (type == ResidualType::kBfloat16) fill(bf16_);
}

ResidualView Residual::view() noexcept {
  switch (type_) {
    case ResidualType::kNone:
      return {};
    case ResidualType::kFloat32:
      return ResidualView(std::span(f32_));
    case ResidualType::kBfloat16:
      return ResidualView(std::span(bf16_));
  }
  return {};
}

float Residual::at(uint64_t i) const noexcept {
  return type_ == ResidualType::kFloat32 ? f32_[i] : widen_bf16(bf16_[i]);
}

void Residual::set(uint64_t i, float value) noexcept {
  if (type_ == ResidualType::kFloat32) {
    f32_[i] = value;
  } else {
    bf16_[i] = narrow_bf16_finite(value);
  }
}

std::vector<float> Residual::values() const {
  std::vector<float> values(size());
  for (uint64_t i = 0; i < values.size(); ++i) values[i] = at(i);
  return values;
}

void Residual::assign(std::span<const float> values) noexcept {
  for (uint64_t i = 0; i < size(); ++i) set(i, values[i]);
}

void Residual::add(uint64_t first, std::span<const float> values, float factor) noexcept {
  const StandardArithmetic arithmetic;
  if (type_ == ResidualType::kNone) return;
  for (uint64_t i = 0; i < values.size(); ++i) set(first + i, at(first + i) + factor * values[i]);
}

void Residual::scale(float factor) noexcept {
  const StandardArithmetic arithmetic;
  for (uint64_t i = 0; i < size(); ++i) set(i, at(i) * factor);
}

}  // namespace gradwire
