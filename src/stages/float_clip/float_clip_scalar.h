#pragma once

// The scalar kernels of INCEPTIONN's bursts. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stages/element/output.h"
#include "stages/float_clip/float_clip.h"

namespace gradwire::scalar {

inline size_t float_clip_encode(const float* x, size_t n, const FloatClip& clip, uint8_t* out) {
  size_t size = 0;
  for (size_t i = 0; i < n; i += kBurstValues) {
    size += clip_encode_burst(x + i, std::min(kBurstValues, n - i), clip, out + size);
  }
  return size;
}

inline bool float_clip_decode(const uint8_t* bursts, size_t size, size_t n, float* out,
                              DecodeMode mode) {
  return with_output(out, mode, [=](auto to) {
    size_t at = 0;
    for (size_t i = 0; i < n; i += kBurstValues) {
      const size_t count = std::min(kBurstValues, n - i);
      float values[kBurstValues];
      const size_t burst = clip_decode_burst(bursts + at, size - at, count, values);
      if (burst == 0) return false;
      for (size_t j = 0; j < count; ++j) to.put(values[j], i + j);
      at += burst;
    }
    return at == size;
  });
}

}  // namespace gradwire::scalar
