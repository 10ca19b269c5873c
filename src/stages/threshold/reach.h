#pragma once

// Values whose magnitude reaches a threshold, one element.

#include <cstdint>

#include "base/host_device.h"

namespace gradwire {

// Is |x| at least t > 0? NaN is not.
GW_HOST_DEVICE inline bool reaches(float x, float t) { return x >= t || x <= -t; }

// The trit of a value that is sent if its magnitude reaches t.
GW_HOST_DEVICE inline int reached_trit(float b, float t) {
  if (!reaches(b, t)) return 0;
  return b < 0.0f ? -1 : 1;
}

// The magnitude that all values that are sent decode to: their mean; 0 if no value is sent.
GW_HOST_DEVICE inline float mean_reached(double sum, uint64_t count) {
  return count == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(count));
}

}  // namespace gradwire
