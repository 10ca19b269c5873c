#pragma once

// From payloads of trits to values (spec/format.md, 3lc). Any bytes are safe.

#include <cstdint>

#include "cuda/coded/coded_decode.cuh"
#include "cuda/common/input.cuh"
#include "cuda/fixed/fixed_decode.cuh"
#include "cuda/ternary/ternary_code.cuh"
#include "stages/element/float_bits.h"
#include "stages/trits/trit.h"
#include "stages/trits/two_bits.h"

namespace gradwire::cuda {

// Trits at fixed places, as fixed_decode.cuh takes them: coder none, and two bits each. kTrits to a
// byte: kTritsPerByte or kTwoBitTrits.
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

// Turns the decoded trits of a chunk into values.
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

// Expands zero runs to `n` packed bytes. false: the codes stand for another number of bytes.
__device__ inline bool expand_zero_runs(const uint8_t* codes, uint32_t size, uint32_t n,
                                        uint32_t* packed_words, BlockShared& shared) {
  constexpr uint32_t kEach = kPackedBytes / kThreads;
  auto* packed = reinterpret_cast<uint8_t*>(packed_words);
  constexpr uint32_t kZeros = kZeroByte * 0x01010101u;
  for (uint32_t i = threadIdx.x; i * 4 < n; i += kThreads) packed_words[i] = kZeros;
  const uint32_t begin = threadIdx.x * kEach;
  const uint32_t end = min(begin + kEach, size);
  uint32_t length = 0;
  for (uint32_t i = begin; i < end; ++i) length += static_cast<uint32_t>(run_length_of(codes[i]));
  uint32_t total = 0;
  uint32_t at = block_exclusive_sum(length, shared, total);
  if (total != n) return false;
  for (uint32_t i = begin; i < end; ++i) {
    if (codes[i] < kRunBase) packed[at] = codes[i];
    at += static_cast<uint32_t>(run_length_of(codes[i]));
  }
  __syncthreads();
  return true;
}

// Decodes a chunk of packed bytes, whose zero runs may be coded; not chunks in Golomb-Rice code
// (rice_decode.cuh). Wrong bytes refuse the payload.
static GW_KERNEL void decode_ternary(Segments segments, Decoding decoding, TernaryCoder coder) {
  __shared__ uint32_t expanded[kPackedBytes / 4];
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const uint32_t n = chunk.n;
  const uint8_t* five = decoding.bytes_of(chunk);  // packed bytes
  if (five == nullptr) return;
  const uint32_t size = decoding.size[chunk.number];
  const auto packed = static_cast<uint32_t>(packed_size(n));
  bool valid = decoding.any_scale[chunk.index] != 0;
  if (valid && coder == TernaryCoder::kRice && size < packed) return;
  if (valid && coder == TernaryCoder::kZeroRun) {
    valid = expand_zero_runs(five, size, packed, expanded, shared);
    five = reinterpret_cast<const uint8_t*>(expanded);
  }
  uint32_t wrong = 0;
  for (uint32_t i = threadIdx.x; valid && i < packed; i += kThreads) {
    wrong |= five[i] > kLargestPackedByte;
    for (uint32_t place = 0; i + 1 == packed && place < kTritsPerByte; ++place) {
      wrong |= i * kTritsPerByte + place >= n && trit_at(five[i], static_cast<int>(place)) != 0;
    }
  }
  valid = valid && block_max(wrong, shared) == 0;
  if (valid) {
    put_trits(chunk, decoding, [&](uint32_t at) {
      return trit_at(five[at / kTritsPerByte], static_cast<int>(at % kTritsPerByte));
    });
  }
  if (!valid && threadIdx.x == 0) decoding.refuse(chunk);
}

}  // namespace gradwire::cuda
