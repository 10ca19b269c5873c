#pragma once

// Sums of values in a fixed order.

#include <cstdint>

#include "base/host_device.h"
#include "stages/element/float_bits.h"

namespace gradwire {

// Sum, sum of squares and the largest magnitude. The sums are kept as doubles in 16 lanes, so that
// the order of the additions, and with it every bit of the result, is the same for any vector
// length: value i goes to lane i % 16, and at the end lane l adds lane l + 8, then l + 4, l + 2 and
// l + 1.
struct Moments {
  double sum = 0;
  double squares = 0;
  uint32_t largest = 0;  // bits of a magnitude, as Kernels::absmax
};

inline constexpr int kMomentLanes = 16;

struct MomentLanes {
  double sum[kMomentLanes] = {};
  double squares[kMomentLanes] = {};
  uint32_t largest = 0;

  GW_HOST_DEVICE void add(uint64_t i, float x) {
    const double wide = x;
    sum[i % kMomentLanes] += wide;
    squares[i % kMomentLanes] += wide * wide;
    if (magnitude_bits(x) > largest) largest = magnitude_bits(x);
  }

  GW_HOST_DEVICE Moments total() {
    for (int half = kMomentLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) {
        sum[lane] += sum[lane + half];
        squares[lane] += squares[lane + half];
      }
    }
    return {sum[0], squares[0], largest};
  }
};

}  // namespace gradwire
