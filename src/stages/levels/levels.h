#pragma once

// Stochastic quantization to whole levels (QSGD, section 3.1), one element. Rules as in
// stages/element/float_bits.h.

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "stages/element/float_bits.h"

namespace gradwire {

// Levels go from -s to s, s from 1 to 127, so that they fit an int8.
inline constexpr int kLargestLevel = 127;
// The value of level_width(kLargestLevel).
inline constexpr int kLargestLevelWidth = 8;

// How the values of a group become levels.
struct LevelScale {
  // v * prescale * inverse is the level of v as a fixed-point number with 24 fractional bits.
  float prescale;
  float inverse;
};

// Euclidean norm of values from the sum of their squares: at most FLT_MAX if the values are finite,
// else NaN or infinity.
GW_HOST_DEVICE inline float l2_norm_of(double squares) {
  const double norm = std::sqrt(squares);
  return norm > FLT_MAX && norm <= DBL_MAX ? FLT_MAX : static_cast<float>(norm);
}

// The step between levels for a finite norm >= 0: norm / s, rounded up where s * unit would be less
// than the norm. So no value needs a level above s, and no value is lost where norm / s is too
// small for a float. Where s * unit would overflow, the step is the largest for which it does not.
GW_HOST_DEVICE inline float level_unit(float norm, int32_t s) {
  const auto largest = static_cast<float>(s);
  float unit = norm / largest;
  // The product is exact: 24 bits and 7 bits.
  if (static_cast<double>(unit) * s < norm) unit = float_of(bits_of(unit) + 1);
  if (unit * largest > FLT_MAX) unit = float_of(bits_of(unit) - 1);
  return unit;
}

// `unit` is level_unit(norm, s) and above 0. Scaling before the division keeps its result finite;
// the inverse is lowered until the level of the norm is at most s.
GW_HOST_DEVICE inline LevelScale level_scale(float unit, int32_t s) {
  const auto largest = static_cast<float>(s);
  const float prescale = unit < 0x1p-64f ? 0x1p64f : 1.0f;
  const float next = float_of(bits_of(unit) + 1);
  // No norm with this unit is larger. The norm of the largest unit may be FLT_MAX.
  const float norm = next * largest > FLT_MAX ? FLT_MAX : unit * largest;
  float inverse = 0x1p24f / (unit * prescale);
  while (norm * prescale * inverse > largest * 0x1p24f) {
    inverse = float_of(bits_of(inverse) - 1);
  }
  return {prescale, inverse};
}

// The level of v, |v| <= norm: floor(v / unit + u), u = (word >> 8) * 2^-24; from -s to s. v / unit
// is cut off towards 0 after 24 fractional bits, so the expectation of the level is v / unit, apart
// from 2^-24 and the roundings of the inverse and the product.
GW_HOST_DEVICE inline int32_t level_of(float v, LevelScale scale, uint32_t word) {
  const auto fixed = static_cast<int32_t>(v * scale.prescale * scale.inverse);
  return (fixed + static_cast<int32_t>(word >> 8)) >> 24;
}

// The value that a level decodes to.
GW_HOST_DEVICE inline float level_value(int32_t level, float unit) {
  return static_cast<float>(level) * unit;
}

// Bits of a level where all levels have the same width: a level is written as level + s, 0 to 2 s.
GW_HOST_DEVICE constexpr int level_width(int32_t s) {
  int width = 1;
  while (s > 0) ++width, s >>= 1;
  return width;
}

// Bytes of n levels of `width` bits.
GW_HOST_DEVICE constexpr uint64_t packed_levels_size(uint64_t n, int width) {
  const auto bits = static_cast<uint64_t>(width);
  return n / 8 * bits + (n % 8 * bits + 7) / 8;
}

}  // namespace gradwire
