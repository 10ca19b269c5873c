#pragma once

// One bit a value: its sign; and the sums of the values of either sign.

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "stages/element.h"

namespace gradwire {

struct SignSums {
  double positive = 0;  // of the values that are not below 0, NaN among them
  double negative = 0;
  uint64_t negatives = 0;  // number of values below 0
};

// Sums in lanes, in the order of MomentLanes.
struct SignLanes {
  double positive[kMomentLanes] = {};
  double negative[kMomentLanes] = {};
  uint64_t negatives = 0;

  // Value i. A lane that gets nothing may as well get +0, which changes no bit of a sum.
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

// What the values of either sign decode to: their means (1-bit SGD). 0 where there is none.
struct SignMeans {
  float positive = 0;
  float negative = 0;

  GW_HOST_DEVICE float of(bool below) const { return below ? negative : positive; }

  GW_HOST_DEVICE static SignMeans create(SignSums sums, uint64_t n) {
    return {mean(sums.positive, n - sums.negatives), mean(sums.negative, sums.negatives)};
  }

  GW_HOST_DEVICE static float mean(double sum, uint64_t count) {
    if (count == 0) return 0.0f;
    // Rounding may lift the mean of many of the largest values above them.
    const double mean = sum / static_cast<double>(count);
    if (mean > FLT_MAX) return FLT_MAX;
    return mean < -FLT_MAX ? -FLT_MAX : static_cast<float>(mean);
  }
};

GW_HOST_DEVICE constexpr uint64_t sign_bytes(uint64_t n) { return n / 8 + (n % 8 != 0 ? 1 : 0); }

// Packs the signs of b = x + residual, whose values decode to `means`.
template <class Residual>
void pack_each_sign(const float* x, Residual residual, size_t n, SignMeans means, uint8_t* bits) {
  for (size_t i = 0; i < n; ++i) {
    const float b = residual.add(x[i], i);
    const bool below = b < 0.0f;
    if (i % 8 == 0) bits[i / 8] = 0;
    bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | (below ? 1 : 0) << i % 8);
    residual.set(b - means.of(below), i);
  }
}

}  // namespace gradwire
