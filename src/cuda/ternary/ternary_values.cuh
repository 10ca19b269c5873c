#pragma once

// Turns decoded trits into values.

#include <cstdint>

#include "cuda/coded/coded_decode.cuh"
#include "cuda/common/input.cuh"
#include "stages/element/float_bits.h"
#include "stages/trits/trit.h"

namespace gradwire::cuda {

// The values of a chunk.
class TernaryValues {
 public:
  __device__ TernaryValues(const Chunk& chunk, const Decoding& decoding)
      : scales_(decoding.scales_of(chunk)),
        out_(decoding.out + chunk.begin),
        n_(chunk.n),
        several_(chunk.segment.scales > 1),
        adds_(decoding.mode == DecodeMode::kAdd),
        scale_(float_of(load_word<uint32_t>(scales_))),
        scale_of_(chunk) {}

  // Stores or adds trit_of(at) of up to kUnrolled values, kStride apart from `base` on. All sums
  // are read before one is written, and sums that do not change are neither read nor written.
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

// Stores or adds all values of a chunk. The whole block calls it.
template <typename TritOf>
__device__ void put_trits(const Chunk& chunk, const Decoding& decoding, const TritOf& trit_of) {
  const TernaryValues values(chunk, decoding);
  for (uint32_t base = threadIdx.x; base < chunk.n; base += kUnrolled * kThreads) {
    values.put<kThreads>(base, trit_of);
  }
}

}  // namespace gradwire::cuda
