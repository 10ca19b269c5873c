#pragma once

// Numbers below 2^21 in one to three bytes: seven bits each, the lowest first; the highest bit says
// that another byte follows (LEB128). No number has a longer form than it needs.

#include <cstddef>
#include <cstdint>
#include <optional>

namespace gradwire {

inline constexpr size_t kLongestVarint = 3;

inline uint8_t* write_varint(uint32_t value, uint8_t* out) {
  for (; value >= 0x80; value >>= 7) *out++ = static_cast<uint8_t>(value | 0x80);
  *out++ = static_cast<uint8_t>(value);
  return out;
}

constexpr size_t varint_size(uint32_t value) { return value < 0x80 ? 1 : value < 0x4000 ? 2 : 3; }

// Reads at `at`, which moves on. Nothing if the bytes end, the number is 2^21 or more, or a shorter
// form exists.
inline std::optional<uint32_t> read_varint(const uint8_t*& at, const uint8_t* end) {
  uint32_t value = 0;
  for (size_t i = 0; i < kLongestVarint && at != end; ++i) {
    const uint8_t byte = *at++;
    value |= static_cast<uint32_t>(byte & 0x7f) << (7 * i);
    if (byte < 0x80) return byte == 0 && i > 0 ? std::nullopt : std::optional(value);
  }
  return std::nullopt;
}

}  // namespace gradwire
