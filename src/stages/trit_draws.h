#pragma once

// Trits that are drawn (TernGrad, section 3), and two bits for each.

#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "stages/element.h"
#include "stages/trit_bits.h"

namespace gradwire {

// The difference of two sums is all rounding where it is not above this part of them.
inline constexpr double kLeastVariance = 0x1p-32;

// What n finite values are clipped to: `clip` times their population standard deviation, in double.
// FLT_MAX where this is 0, but for rounding, and where `clip` is 0.
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

// How b becomes a trit: its sign with the probability |b| / scale, b clipped to `limit` before.
struct TritDraw {
  float limit;
  float step;  // scale * 2^-24; below a scale of 2^-102 it is rounded

  GW_HOST_DEVICE static TritDraw create(float limit, float scale) {
    return {limit, scale * 0x1p-24f};
  }

  // Whether any value fares otherwise than without the limit: none does where no threshold reaches
  // it.
  [[nodiscard]] GW_HOST_DEVICE bool clips() const { return limit <= 0x1.fffffep23f * step; }
};

// Never 0 where |b| and the limit are at least the scale, as (2^24 - 1) * step rounds to less.
GW_HOST_DEVICE inline int draw_trit(float b, TritDraw draw, uint32_t word) {
  const float clipped = b > draw.limit ? draw.limit : b < -draw.limit ? -draw.limit : b;
  const float threshold = static_cast<float>(word >> 8) * draw.step;
  return (clipped > threshold) - (clipped < -threshold);
}

// Two bits a trit: 0, 1 for +1, 2 for -1; the first of four in the lowest bits of a byte.
inline constexpr int kTwoBitTrits = 4;

GW_HOST_DEVICE constexpr uint64_t two_bit_size(uint64_t n) {
  return n / kTwoBitTrits + (n % kTwoBitTrits != 0 ? 1 : 0);
}

// The trit of a code 0 to 2.
GW_HOST_DEVICE constexpr int two_bit_trit(int code) { return (code & 1) - (code >> 1); }

// Bit i goes to bit 2 i.
GW_HOST_DEVICE constexpr uint64_t spread_bits(uint32_t bits) {
  uint64_t spread = bits;
  spread = (spread | spread << 16) & 0x0000ffff0000ffffu;
  spread = (spread | spread << 8) & 0x00ff00ff00ff00ffu;
  spread = (spread | spread << 4) & 0x0f0f0f0f0f0f0f0fu;
  spread = (spread | spread << 2) & 0x3333333333333333u;
  return (spread | spread << 1) & 0x5555555555555555u;
}

// n trits to two_bit_size(n) bytes.
inline void pack_two_bit_words(const uint64_t* plus, const uint64_t* minus, size_t n,
                               uint8_t* packed) {
  constexpr size_t kHalfBytes = kWordBits / 2 / kTwoBitTrits;
  const size_t size = two_bit_size(n);
  for (size_t at = 0; at < size; at += kHalfBytes) {
    const size_t word = at / (2 * kHalfBytes);
    const auto shift = at % (2 * kHalfBytes) == 0 ? 0 : kWordBits / 2;
    const uint64_t codes = spread_bits(static_cast<uint32_t>(plus[word] >> shift)) |
                           spread_bits(static_cast<uint32_t>(minus[word] >> shift)) << 1;
    if (size - at >= kHalfBytes) {
      store_unaligned(reinterpret_cast<uint64_t*>(packed + at), codes);
      continue;
    }
    for (size_t i = at; i < size; ++i) packed[i] = static_cast<uint8_t>(codes >> 8 * (i - at));
  }
}

}  // namespace gradwire
