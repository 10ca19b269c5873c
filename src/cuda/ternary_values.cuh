#pragma once

// From trits to values, where decoding ends.

#include <cstdint>

#include "cuda/input.cuh"
#include "cuda/segments.h"
#include "cuda/unaligned.cuh"
#include "gradwire/cuda.h"
#include "stages/element.h"

namespace gradwire::cuda {

// Of a chunk.
class TernaryValues {
 public:
  __device__ TernaryValues(const Chunk& chunk, const uint8_t* scales, float* out, DecodeMode mode)
      : scales_(scales),
        out_(out + chunk.begin),
        n_(chunk.n),
        several_(chunk.segment.scales > 1),
        adds_(mode == DecodeMode::kAdd),
        scale_(float_of(load_word<uint32_t>(scales))),
        scale_of_(chunk) {}

  // Stores or adds trit_of(at) of up to kUnrolled values, kStride apart from `base` on. Sums are
  // under way all at once, and those that don't change are left alone.
  template <uint32_t kStride, typename TritOf>
  __device__ void put(uint32_t base, const TritOf& trit_of) const {
    int trits[kUnrolled] = {};
    float values[kUnrolled] = {};
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      const uint32_t at = base + i * kStride;
      if (at < n_) trits[i] = trit_of(at);
    }
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      if (adds_ && trits[i] != 0) values[i] = out_[base + i * kStride];
    }
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      const uint32_t at = base + i * kStride;
      if (at >= n_ || (adds_ && trits[i] == 0)) continue;
      const float m = several_ && trits[i] != 0
                          ? float_of(load_word<uint32_t>(scales_ + 4 * scale_of_(at)))
                          : scale_;
      out_[at] = adds_ ? ternary_accumulate(values[i], trits[i], m) : ternary_value(trits[i], m);
    }
  }

 private:
  const uint8_t* scales_;
  float* out_;
  uint32_t n_;
  bool several_;
  bool adds_;
  float scale_;
  ScaleOf scale_of_;
};

// Of all values of a chunk, by the whole block.
template <typename TritOf>
__device__ void put_trits(const Chunk& chunk, const uint8_t* scales, float* out, DecodeMode mode,
                          const TritOf& trit_of) {
  const TernaryValues values(chunk, scales, out, mode);
  for (uint32_t base = threadIdx.x; base < chunk.n; base += kUnrolled * kThreads) {
    values.put<kThreads>(base, trit_of);
  }
}

}  // namespace gradwire::cuda
