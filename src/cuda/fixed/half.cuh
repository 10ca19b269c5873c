#pragma once

// Codecs of 16 bits a value.

#include <cstdint>

#include "cuda/common/unaligned.cuh"
#include "cuda/fixed/fixed_kernels.cuh"
#include "stages/element/bfloat16.h"

namespace gradwire::cuda {

// Conversion: narrow, widen, and kRoundsToInfinity, magnitude bits as in codecs/half.h.
template <typename Conversion>
struct HalfFormat {
  static constexpr uint32_t kScaleBytes = 0;
  static constexpr bool kEmptyIsZero = false;
  static constexpr bool kSparse = false;
  static constexpr uint32_t kLeastInfinite = Conversion::kRoundsToInfinity;
  struct Scale {};

  Magnitudes magnitudes{};  // of segments; only a residual makes values refused

  void take_scratch(const Segments& segments, ScratchLayout& layout) {
    magnitudes = {.of_scale = nullptr, .of_segment = layout.take<uint32_t>(segments.count)};
  }
  [[nodiscard]] Status prepare(const Segments& segments, const Input& input,
                               EncodedSegment* encoded, cudaStream_t stream) const {
    if (input.keeps_residual()) return measure(segments, input, encoded, magnitudes, stream);
    return launch(clear_magnitudes, blocks_for(segments.count), stream, segments, encoded,
                  magnitudes);
  }

  GW_HOST_DEVICE static uint64_t bytes(uint64_t n) { return n * sizeof(uint16_t); }
  __device__ bool refused(uint32_t index) const {
    return magnitudes.of_segment[index] >= kLeastInfinite;
  }
  __device__ bool sent(uint32_t) const { return true; }
  __device__ Scale scale(uint64_t) const { return {}; }
  __device__ static float put(uint8_t* values, uint32_t at, bool there, float b, Scale) {
    const uint16_t half = Conversion::narrow(b);
    if (there) store_word(values + bytes(at), half);
    return b - Conversion::widen(half);
  }

  __device__ static Scale load(const uint8_t*) { return {}; }
  __device__ static uint32_t code(const uint8_t* values, uint32_t at) {
    return load_word<uint16_t>(values + bytes(at));
  }
  __device__ static bool valid_code(uint32_t, uint32_t) { return true; }
  __device__ static bool valid_end(uint32_t, uint32_t) { return true; }
  __device__ static float value(uint32_t code, uint32_t, Scale) {
    return Conversion::widen(static_cast<uint16_t>(code));
  }
};

}  // namespace gradwire::cuda
