#pragma once

// From payloads of trits to values (spec/format.md, 3lc). Any bytes are safe.

#include <cstdint>

#include "codecs/ternary.h"
#include "cuda/block.cuh"
#include "cuda/segments.h"
#include "cuda/ternary_code.cuh"
#include "cuda/ternary_values.cuh"
#include "cuda/unaligned.cuh"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

// Scratch of a call.
struct DecodeScratch {
  uint64_t* begin;  // of each chunk, in the payloads; kNoChunk: it is not to be decoded
  uint32_t* size;
};

inline constexpr uint64_t kNoChunk = ~uint64_t{0};

// Where each chunk of a segment lies, of coders whose chunks vary in size; a block a segment. What
// is wrong with sizes and scales is found here.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    find_chunks(Segments segments, const uint8_t* payloads, const PayloadPlace* places,
                DecodedSegment* decoded, DecodeScratch scratch) {
  __shared__ BlockShared shared;
  const Segment segment = segments.segments[blockIdx.x];
  const PayloadPlace place = places[blockIdx.x];
  const uint8_t* payload = payloads + place.begin;
  const bool listed = segment.chunks > 1;
  const uint64_t sizes_at = 4 * static_cast<uint64_t>(segment.scales);
  const uint64_t chunks_at = sizes_at + (listed ? 2 * static_cast<uint64_t>(segment.chunks) : 0);
  const bool empty = place.size == 0;
  bool valid = empty || (segment.n > 0 && place.size >= chunks_at);
  uint32_t wrong = 0;
  uint32_t not_zero = 0;
  for (uint64_t i = threadIdx.x; valid && !empty && i < segment.scales; i += kThreads) {
    const uint32_t bits = load_word<uint32_t>(payload + 4 * i);
    wrong |= bits >= kNonFiniteBits;
    not_zero |= bits;
  }
  valid = valid && block_max(wrong, shared) == 0;
  valid = valid && (block_max(not_zero, shared) != 0 || empty);

  uint64_t end = chunks_at;  // of the chunks before
  for (uint32_t base = 0; base < segment.chunks; base += kThreads) {
    const uint32_t chunk = base + threadIdx.x;
    uint32_t size = 0;
    if (valid && !empty && chunk < segment.chunks) {
      const auto packed = static_cast<uint32_t>(packed_size(segment.values_of(chunk)));
      if (listed) {
        size = payload[sizes_at + 2 * chunk] |
               static_cast<uint32_t>(payload[sizes_at + 2 * chunk + 1]) << 8;
      } else {
        const uint64_t rest = place.size - chunks_at;
        size = rest > packed ? packed + 1 : static_cast<uint32_t>(rest);
      }
      wrong |= size > packed;
    }
    uint32_t total = 0;
    const uint32_t before = block_exclusive_sum(size, shared, total);
    if (chunk < segment.chunks) {
      scratch.begin[segment.first_chunk + chunk] =
          valid && !empty ? place.begin + end + before : kNoChunk;
      scratch.size[segment.first_chunk + chunk] = size;
    }
    end += total;
  }
  valid = valid && block_max(wrong, shared) == 0 && (empty || end == place.size);
  if (!valid) {
    for (uint32_t i = threadIdx.x; i < segment.chunks; i += kThreads) {
      scratch.begin[segment.first_chunk + i] = kNoChunk;
    }
  }
  if (threadIdx.x == 0) decoded[blockIdx.x] = {valid ? 1u : 0u, empty ? 1u : 0u};
}

// Expands zero runs to exactly `n` packed bytes. false: the codes stand for another number.
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

// Decodes a chunk of packed bytes, their zero runs coded or not; not those in Golomb-Rice code
// (rice_decode.cuh). What is wrong with its bytes marks the segment.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    decode_ternary(Segments segments, const uint8_t* payloads, const PayloadPlace* places,
                   TernaryCoder coder, float* out, DecodeMode mode, DecodedSegment* decoded,
                   DecodeScratch scratch) {
  __shared__ uint32_t expanded[kPackedBytes / 4];
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const uint32_t n = chunk.n;
  if (scratch.begin[blockIdx.x] == kNoChunk) {
    if (decoded[chunk.index].empty != 0 && mode == DecodeMode::kStore) {
      for (uint32_t at = threadIdx.x; at < n; at += kThreads) out[chunk.begin + at] = 0.0f;
    }
    return;
  }
  const uint8_t* scales = payloads + places[chunk.index].begin;
  const uint8_t* bytes = payloads + scratch.begin[blockIdx.x];
  const uint32_t size = scratch.size[blockIdx.x];
  const auto packed = static_cast<uint32_t>(packed_size(n));
  const uint8_t* five = bytes;  // packed bytes
  bool valid = true;
  if (coder == TernaryCoder::kRice && size < packed) return;
  if (coder == TernaryCoder::kZeroRun) {
    valid = expand_zero_runs(bytes, size, packed, expanded, shared);
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
    put_trits(chunk, scales, out, mode, [&](uint32_t at) {
      return trit_at(five[at / kTritsPerByte], static_cast<int>(at % kTritsPerByte));
    });
  }
  if (!valid && threadIdx.x == 0) decoded[chunk.index].valid = 0;
}

}  // namespace gradwire::cuda
