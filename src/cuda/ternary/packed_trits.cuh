#pragma once

// Trits at fixed places, as fixed_decode.cuh takes them: coder none, and two bits each.

#include <cstdint>

#include "cuda/fixed/fixed_decode.cuh"
#include "stages/ternary/trit_draws.h"
#include "stages/trits/two_bits.h"

namespace gradwire::cuda {

// kTrits to a byte: kTritsPerByte or kTwoBitTrits.
template <uint32_t kTrits>
struct PackedTrits : FloatScales {
  static constexpr bool kSparse = true;
  static constexpr bool kTwoBits = kTrits == kTwoBitTrits;
  static_assert(kTwoBits || kTrits == kTritsPerByte);

  __device__ static uint32_t code(const uint8_t* values, uint32_t at) {
    return values[at / kTrits];
  }
  __device__ static int trit(uint32_t code, uint32_t at) {
    const uint32_t place = at % kTrits;
    if constexpr (kTwoBits) return two_bit_trit(code >> 2 * place & 3);
    return trit_at(code, static_cast<int>(place));
  }
  __device__ static bool valid_code(uint32_t code, uint32_t at) {
    if constexpr (kTwoBits) return (code >> 2 * (at % kTrits) & 3) != 3;
    return code <= kLargestPackedByte;
  }
  // The trits and bits after the last value are 0.
  __device__ static bool valid_end(uint32_t code, uint32_t n) {
    if constexpr (kTwoBits) return n % kTrits == 0 || code >> 2 * (n % kTrits) == 0;
    bool valid = true;
    for (uint32_t at = n; at % kTrits != 0; ++at) valid = valid && trit(code, at) == 0;
    return valid;
  }
  __device__ static bool adds(uint32_t code, uint32_t at) { return trit(code, at) != 0; }
  __device__ static float value(uint32_t code, uint32_t at, Scale m) {
    return ternary_value(trit(code, at), m);
  }
  __device__ static float add(float sum, uint32_t code, uint32_t at, Scale m) {
    return ternary_accumulate(sum, trit(code, at), m);
  }
};

}  // namespace gradwire::cuda
