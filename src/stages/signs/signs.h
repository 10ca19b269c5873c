#pragma once

// One bit a value: its sign; and the sums of the values of either sign.

#include <cfloat>
#include <cstdint>

#include "base/host_device.h"
#include "stages/magnitude/moments.h"

namespace gradwire {

struct SignSums {
  double positive = 0;  // sum of the values that are not below 0, NaN included
  double negative = 0;
  uint64_t negatives = 0;  // number of values below 0
};

// Sums in lanes, in the order of MomentLanes.
struct SignLanes {
  double positive[kMomentLanes] = {};
  double negative[kMomentLanes] = {};
  uint64_t negatives = 0;

  // Adds value i. SIMD code adds +0 to the other lane, which changes no bit of its sum.
  GW_HOST_DEVICE void add(uint64_t i, float x) {
    const bool below = x < 0.0f;
    double* lanes = below ? negative : positive;
    lanes[i % kMomentLanes] += static_cast<double>(x);
    negatives += below ? 1 : 0;
  }

  GW_HOST_DEVICE SignSums total() {
    for (int half = kMomentLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) {
        positive[lane] += positive[lane + half];
        negative[lane] += negative[lane + half];
      }
    }
    return {positive[0], negative[0], negatives};
  }
};

// The values of either sign decode to their mean (1-bit SGD), which is 0 if no value has that sign.
struct SignMeans {
  float positive = 0;
  float negative = 0;

  GW_HOST_DEVICE float of(bool below) const { return below ? negative : positive; }

  GW_HOST_DEVICE static SignMeans create(SignSums sums, uint64_t n) {
    return {mean(sums.positive, n - sums.negatives), mean(sums.negative, sums.negatives)};
  }

  GW_HOST_DEVICE static float mean(double sum, uint64_t count) {
    if (count == 0) return 0.0f;
    // Rounding may make the mean of many values FLT_MAX larger than FLT_MAX.
    const double mean = sum / static_cast<double>(count);
    if (mean > FLT_MAX) return FLT_MAX;
    return mean < -FLT_MAX ? -FLT_MAX : static_cast<float>(mean);
  }
};

GW_HOST_DEVICE constexpr uint64_t sign_bytes(uint64_t n) { return n / 8 + (n % 8 != 0 ? 1 : 0); }

}  // namespace gradwire
