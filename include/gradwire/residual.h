#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/export.h"

namespace gradwire {

// The values that error feedback keeps for one segment between steps (3LC, section 3.1: the error
// accumulation buffer). They are read and written as float32, whatever type stores them.
class GRADWIRE_EXPORT Residual {
 public:
  Residual() = default;
  // n zeros. kNone keeps nothing and has size 0.
  Residual(ResidualType type, uint64_t n);

  [[nodiscard]] ResidualType type() const noexcept { return type_; }
  [[nodiscard]] uint64_t size() const noexcept { return size_; }
  [[nodiscard]] uint64_t nbytes() const noexcept;
  [[nodiscard]] ResidualView view() noexcept;

  // From now on the values are those in `memory`, which has nbytes(), suits their type and stays
  // the caller's: it may change what is there between two calls.
  void lie_in(std::span<std::byte> memory) noexcept;

  // The values; empty for kNone.
  [[nodiscard]] std::vector<float> values() const;
  // values.size() == size().
  void assign(std::span<const float> values) noexcept;
  // residual[first + i] += factor * values[i].
  void add(uint64_t first, std::span<const float> values, float factor) noexcept;
  // Multiplies every value by factor, for gradients whose scale changed (a gradient scaler's new
  // scale).
  void scale(float factor) noexcept;

 private:
  [[nodiscard]] float* f32() noexcept;
  [[nodiscard]] uint16_t* bf16() noexcept;
  [[nodiscard]] float at(uint64_t i) const noexcept;
  void set(uint64_t i, float value) noexcept;

  ResidualType type_ = ResidualType::kNone;
  uint64_t size_ = 0;
  std::byte* lent_ = nullptr;  // where the values are, unless they are in one of these
  std::vector<float> f32_;
  std::vector<uint16_t> bf16_;
};

}  // namespace gradwire
