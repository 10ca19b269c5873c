#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gradwire {

// Loads and stores of unaligned fields, which are little-endian on the wire. The caller has checked
// the bounds.

// Arrays of float32 and bf16 go to the wire with memcpy, which is only right on a little-endian
// machine.
static_assert(std::endian::native == std::endian::little, "gradwire needs a little-endian machine");

template <std::unsigned_integral T>
[[nodiscard]] inline T load_le(const std::byte* src) noexcept {
  T value;
  std::memcpy(&value, src, sizeof value);
  return value;
}

template <std::unsigned_integral T>
inline void store_le(std::byte* dst, T value) noexcept {
  std::memcpy(dst, &value, sizeof value);
}

[[nodiscard]] inline float load_le_f32(const std::byte* src) noexcept {
  return std::bit_cast<float>(load_le<uint32_t>(src));
}

inline void store_le_f32(std::byte* dst, float value) noexcept {
  store_le(dst, std::bit_cast<uint32_t>(value));
}

}  // namespace gradwire
