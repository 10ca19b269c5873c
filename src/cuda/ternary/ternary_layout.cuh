#pragma once

#include <cstdint>

#include "codecs/ternary_coder.h"
#include "cuda/common/unaligned.cuh"
#include "stages/element/float_bits.h"
#include "stages/trits/trit.h"

namespace gradwire::cuda {

// The scales of trits (payloads.cuh).
struct TernaryScales {
  static constexpr uint32_t kScaleBytes = sizeof(float);

  // Finite, with a clear sign bit.
  __device__ static bool valid(const uint8_t* scale, bool& any) {
    const auto bits = load_word<uint32_t>(scale);
    any = bits != 0;
    return bits < kNonFiniteBits;
  }
};

// Payloads of trits (coded_layout.cuh).
struct TernaryLayout : TernaryScales {
  static constexpr uint64_t kExtra = 0;
  static constexpr bool kEmptyIsZeros = true;

  TernaryCoder coder;

  explicit TernaryLayout(TernaryCoder its_coder) : coder(its_coder) {}

  // Of coders whose chunks vary in size, as decoders ask for no other.
  __device__ static uint32_t room(uint32_t n) { return static_cast<uint32_t>(packed_size(n)); }
  __device__ static uint32_t least(uint32_t) { return 0; }
  __device__ bool varying() const {
    return coder == TernaryCoder::kZeroRun || coder == TernaryCoder::kRice;
  }
};

}  // namespace gradwire::cuda
