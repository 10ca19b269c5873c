#include "gradwire/residual.h"

#include "base/huge_pages.h"
#include "base/standard_arithmetic.h"
#include "stages/element/bfloat16.h"

namespace gradwire {

Residual::Residual(ResidualType type, uint64_t n)
    : type_(type), size_(type == ResidualType::kNone ? 0 : n) {
  const auto fill = [n](auto& values) {
    values.reserve(n);
    advise_huge_pages(values.data(), n * sizeof(values[0]));
    values.resize(n);
  };
  if (type == ResidualType::kFloat32) fill(f32_);
  if (type == ResidualType::kBfloat16) fill(bf16_);
}

uint64_t Residual::nbytes() const noexcept {
  return size_ * (type_ == ResidualType::kFloat32 ? sizeof(float) : sizeof(uint16_t));
}

void Residual::lie_in(std::span<std::byte> memory) noexcept {
  lent_ = memory.data();
  f32_ = {};
  bf16_ = {};
}

float* Residual::f32() noexcept {
  return lent_ == nullptr ? f32_.data() : reinterpret_cast<float*>(lent_);
}

uint16_t* Residual::bf16() noexcept {
  return lent_ == nullptr ? bf16_.data() : reinterpret_cast<uint16_t*>(lent_);
}

ResidualView Residual::view() noexcept {
  switch (type_) {
    case ResidualType::kNone:
      return {};
    case ResidualType::kFloat32:
      return ResidualView(std::span(f32(), size_));
    case ResidualType::kBfloat16:
      return ResidualView(std::span(bf16(), size_));
  }
  return {};
}

float Residual::at(uint64_t i) const noexcept {
  auto* self = const_cast<Residual*>(this);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  return type_ == ResidualType::kFloat32 ? self->f32()[i] : widen_bf16(self->bf16()[i]);
}

void Residual::set(uint64_t i, float value) noexcept {
  if (type_ == ResidualType::kFloat32) {
    f32()[i] = value;
  } else {
    bf16()[i] = narrow_bf16_finite(value);
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
