#pragma once

// The scalar kernels of levels. Contracts: stages/kernels.def. Level: int8_t, or int16_t for wide
// levels, which are packed with these loops on every target.

#include <cstddef>
#include <cstdint>

#include "stages/element/output.h"
#include "stages/levels/levels.h"

namespace gradwire::scalar {

template <typename Level>
void quantize_levels(const float* x, size_t n, LevelScale scale, const uint32_t* words,
                     Level* levels) {
  for (size_t i = 0; i < n; ++i) {
    levels[i] = static_cast<Level>(level_of(x[i], scale, words[i]));
  }
}
inline void quantize_wide_levels(const float* x, size_t n, LevelScale scale, const uint32_t* words,
                                 int16_t* levels) {
  quantize_levels(x, n, scale, words, levels);
}

template <typename Level>
void scale_levels(const Level* levels, size_t n, float unit, float* out, DecodeMode mode) {
  with_output(out, mode, [=](auto to) {
    for (size_t i = 0; i < n; ++i) to.put(level_value(levels[i], unit), i);
  });
}
inline void scale_wide_levels(const int16_t* levels, size_t n, float unit, float* out,
                              DecodeMode mode) {
  scale_levels(levels, n, unit, out, mode);
}

template <typename Level>
void pack_levels(const Level* levels, size_t n, int32_t s, uint8_t* packed) {
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

template <typename Level>
bool unpack_levels(const uint8_t* packed, size_t n, int32_t s, Level* levels) {
  const int width = level_width(s);
  uint32_t bits = 0;
  int filled = 0;
  for (size_t i = 0; i < n; ++i) {
    for (; filled < width; filled += 8) {
      bits |= static_cast<uint32_t>(*packed++) << filled;
    }
    const auto code = static_cast<int32_t>(bits & ((1u << width) - 1));
    if (code > 2 * s) return false;
    levels[i] = static_cast<Level>(code - s);
    bits >>= width;
    filled -= width;
  }
  return bits == 0;
}

}  // namespace gradwire::scalar
