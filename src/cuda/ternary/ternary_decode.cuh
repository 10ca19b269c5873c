#pragma once

// From payloads of trits to values (spec/format.md, 3lc). Any bytes are safe.

#include <cstdint>

#include "cuda/ternary/ternary_code.cuh"
#include "cuda/ternary/ternary_values.cuh"

namespace gradwire::cuda {

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
