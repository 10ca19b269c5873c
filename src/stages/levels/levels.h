#pragma once

// Stochastic quantization to whole levels (QSGD, section 3.1), one element. Rules as in
// stages/element/float_bits.h.

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "stages/element/float_bits.h"

namespace gradwire {

// Levels go from -s to s. Those of s up to 127 are kept as int8, those of a larger s as int16.
inline constexpr int kLargestByteLevel = 127;
// The value of level_width(kLargestByteLevel).
inline constexpr int kLargestByteLevelWidth = 8;
// The largest s. It fits the header of a frame, and is the root of 67 million values (QSGD's dense
// regime is s = sqrt(n)).
inline constexpr int kLargestLevel = 8191;

// How the values of a group become levels.
struct LevelScale {
  // v * prescale * inverse is the level of v as a fixed-point number with `fraction` fractional
  // bits.
  float prescale;
  float inverse;
  int32_t fraction;
  int32_t largest;  // the level s
};

// Bits of a level where all levels have the same width: a level is written as level + s, 0 to 2 s.
GW_HOST_DEVICE constexpr int level_width(int32_t s) {
  int width = 1;
  while (s > 0) ++width, s >>= 1;
  return width;
}

// Fractional bits of levels in fixed point: s and they fill an int32. 24 for all levels that are
// kept as int8, so that their kernels need not look.
inline constexpr int kByteLevelFraction = 24;
GW_HOST_DEVICE constexpr int level_fraction(int32_t s) {
  return s <= kLargestByteLevel ? kByteLevelFraction : 32 - level_width(s);
}

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
  // The product is exact: 24 bits and 13 bits.
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
  const int fraction = level_fraction(s);
  const auto one = static_cast<float>(1 << fraction);
  float inverse = one / (unit * prescale);
  while (norm * prescale * inverse > largest * one) {
    inverse = float_of(bits_of(inverse) - 1);
  }
  return {prescale, inverse, fraction, s};
}

// The level of v, |v| <= norm: floor(v / unit + u), where u are the upper F = `fraction` bits of
// the word as a fraction; from -s to s. v / unit is cut off towards 0 after F fractional bits, so
// the expectation of the level is v / unit, apart from 2^-F and the roundings of the inverse and
// the product.
//
// Any other v, also NaN, gives some level from -s to s: another thread may have changed the value
// since the norm was taken, and the room for codes ends with those of level s.
GW_HOST_DEVICE inline int32_t level_of(float v, LevelScale scale, uint32_t word) {
  const auto limit = static_cast<float>(scale.largest << scale.fraction);  // exact
  const float product = v * scale.prescale * scale.inverse;
  const auto fixed = static_cast<int32_t>(product > limit    ? limit
                                          : product > -limit ? product
                                                             : -limit);
  return (fixed + static_cast<int32_t>(word >> (32 - scale.fraction))) >> scale.fraction;
}

// The value that a level decodes to.
GW_HOST_DEVICE inline float level_value(int32_t level, float unit) {
  return static_cast<float>(level) * unit;
}

// Bytes of n levels of `width` bits.
GW_HOST_DEVICE constexpr uint64_t packed_levels_size(uint64_t n, int width) {
  const auto bits = static_cast<uint64_t>(width);
  return n / 8 * bits + (n % 8 * bits + 7) / 8;
}

}  // namespace gradwire
