#pragma once

// Trits that are drawn (TernGrad, section 3), one element.

#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "stages/magnitude/moments.h"

namespace gradwire {

// A variance of at most this fraction of the mean square is taken for a rounding error.
inline constexpr double kLeastVariance = 0x1p-32;

// The magnitude that n finite values are clipped to: `clip` times their population standard
// deviation, computed in double. FLT_MAX where the deviation (apart from rounding) or `clip` is 0.
GW_HOST_DEVICE inline float clipping_limit(const Moments& total, uint64_t values, float clip) {
  if (clip == 0.0f) return FLT_MAX;
  const auto n = static_cast<double>(values);
  const double mean = total.sum / n;
  const double mean_square = total.squares / n;
  const double variance = mean_square - mean * mean;
  if (!(variance > kLeastVariance * mean_square)) return FLT_MAX;
  const double limit = static_cast<double>(clip) * std::sqrt(variance);
  if (limit >= static_cast<double>(FLT_MAX)) return FLT_MAX;
  const auto rounded = static_cast<float>(limit);
  return rounded == 0.0f ? FLT_MAX : rounded;
}

// How b becomes a trit: b is clipped to `limit`; then the trit is its sign with the probability
// |b| / scale, else 0.
struct TritDraw {
  float limit;
  float step;  // scale * 2^-24; below a scale of 2^-102 it is rounded

  GW_HOST_DEVICE static TritDraw create(float limit, float scale) {
    return {limit, scale * 0x1p-24f};
  }

  // Whether the limit can change a trit. It cannot where no threshold of draw_trit reaches it.
  [[nodiscard]] GW_HOST_DEVICE bool clips() const { return limit <= 0x1.fffffep23f * step; }
};

// The trit is never 0 where |b| and the limit are at least the scale, because (2^24 - 1) * step
// rounds to less than the scale.
GW_HOST_DEVICE inline int draw_trit(float b, TritDraw draw, uint32_t word) {
  const float clipped = b > draw.limit ? draw.limit : b < -draw.limit ? -draw.limit : b;
  const float threshold = static_cast<float>(word >> 8) * draw.step;
  return (clipped > threshold) - (clipped < -threshold);
}

}  // namespace gradwire
