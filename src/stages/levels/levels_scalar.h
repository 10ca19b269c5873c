#pragma once

// The scalar kernels of levels. Contracts: stages/kernels.def.

#include <cstddef>
#include <cstdint>

#include "stages/element/output.h"
#include "stages/levels/levels.h"

namespace gradwire::scalar {

inline void quantize_levels(const float* x, size_t n, LevelScale scale, const uint32_t* words,
                            int8_t* levels) {
  for (size_t i = 0; i < n; ++i) {
    levels[i] = static_cast<int8_t>(level_of(x[i], scale, words[i]));
  }
}

inline void scale_levels(const int8_t* levels, size_t n, float unit, float* out, DecodeMode mode) {
  with_output(out, mode, [=](auto to) {
    for (size_t i = 0; i < n; ++i) to.put(level_value(levels[i], unit), i);
  });
}

inline void pack_levels(const int8_t* levels, size_t n, int32_t s, uint8_t* packed) {
  const int width = level_width(s);
  uint32_t bits = 0;
  int filled = 0;
  for (size_t i = 0; i < n; ++i) {
    bits |= static_cast<uint32_t>(levels[i] + s) << filled;
    for (filled += width; filled >= 8; filled -= 8, bits >>= 8) {
      *packed++ = static_cast<uint8_t>(bits);
    }
  }
  if (filled > 0) *packed = static_cast<uint8_t>(bits);
}

inline bool unpack_levels(const uint8_t* packed, size_t n, int32_t s, int8_t* levels) {
  const int width = level_width(s);
  uint32_t bits = 0;
  int filled = 0;
  for (size_t i = 0; i < n; ++i) {
    if (filled < width) {
      bits |= static_cast<uint32_t>(*packed++) << filled;
      filled += 8;
    }
    const auto code = static_cast<int32_t>(bits & ((1u << width) - 1));
    if (code > 2 * s) return false;
    levels[i] = static_cast<int8_t>(code - s);
    bits >>= width;
    filled -= width;
  }
  return bits == 0;
}

}  // namespace gradwire::scalar
