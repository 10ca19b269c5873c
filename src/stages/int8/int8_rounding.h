#pragma once

// One element of the codec int8: q in -127..127, the value q * unit.

#include <cstdint>

#include "base/host_device.h"
#include "stages/element/float_bits.h"

namespace gradwire {

inline constexpr int kInt8Levels = 127;
// With a larger unit, 127 * unit would overflow. FLT_MAX / 127 itself rounds to the next float.
inline constexpr uint32_t kLargestInt8UnitBits = 0x7c010203u;
// Added to a float in [-2^22, 2^22], it rounds the float half to even and leaves the integer in the
// lower bits of the sum.
inline constexpr float kRoundingMagic = 12582912.0f;  // 1.5 * 2^23

// The unit of a group, from the finite result of an absmax. 0 where the largest magnitude is
// below 2^-143 or so.
GW_HOST_DEVICE inline float int8_unit(uint32_t absmax_bits) {
  const float unit = float_of(absmax_bits) / static_cast<float>(kInt8Levels);
  const float largest = float_of(kLargestInt8UnitBits);
  return unit > largest ? largest : unit;
}

// b / unit, rounded half to even, from -127 to 127; 0 if the unit is 0.
GW_HOST_DEVICE inline int8_t quantize_int8(float b, float unit) {
  if (unit == 0.0f) return 0;
  const auto limit = static_cast<float>(kInt8Levels);
  const float level = b / unit;
  const float clamped = level > limit ? limit : level < -limit ? -limit : level;
  return static_cast<int8_t>(bits_of(clamped + kRoundingMagic) & 0xffu);
}

GW_HOST_DEVICE inline float int8_value(int8_t q, float unit) {
  return static_cast<float>(q) * unit;
}

}  // namespace gradwire
