#pragma once

// From bursts to values (spec/format.md, inceptionn). Any bytes are safe. Each burst says where the
// next begins: so for a window of a chunk's bytes all threads find how long a burst at each place
// would be, one goes from burst to burst, and all decode those that it met.

#include <cstdint>

#include "cuda/coded_chunks.cuh"
#include "stages/float_clip.h"

namespace gradwire::cuda {

struct BurstLayout {
  __device__ static uint64_t head(const Segment&) { return 0; }
  __device__ static uint32_t room(uint32_t n) { return least(n) + 4 * n; }
  __device__ static uint32_t least(uint32_t n) {
    return static_cast<uint32_t>((n + kBurstValues - 1) / kBurstValues * kBurstTagBytes);
  }
  __device__ static uint64_t extra() { return 0; }
  __device__ static bool varying() { return true; }
  __device__ static bool empty_is_zeros() { return false; }
};

inline constexpr uint32_t kWindowBytes = 4096;
inline constexpr uint32_t kWindowBursts = kWindowBytes / kBurstTagBytes;

struct BurstWindow {
  uint8_t bytes[kWindowBytes + kMaxBurstSize];  // bursts begin in the first kWindowBytes
  uint8_t sizes[kWindowBytes];                  // of a burst that begins there
  uint16_t begin[kWindowBursts];                // of those that are there
  uint32_t bursts;
  uint32_t end;  // behind the last one
};

__device__ inline uint32_t tags_at(const uint8_t* bytes) {
  return bytes[0] | static_cast<uint32_t>(bytes[1]) << 8;
}

// Finds at most `most` bursts in a window whose first begins at its front; zeros stand behind the
// last byte.
__device__ inline void find_bursts(const uint8_t* from, uint32_t size, uint32_t most,
                                   BurstWindow& window) {
  for (uint32_t i = threadIdx.x; i < sizeof window.bytes; i += kThreads) {
    window.bytes[i] = i < size ? from[i] : 0;
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kWindowBytes; i += kThreads) {
    window.sizes[i] =
        static_cast<uint8_t>(kBurstTagBytes + clip_codes_size(tags_at(window.bytes + i)));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t found = 0;
    uint32_t at = 0;
    while (at < kWindowBytes && found < most) {
      window.begin[found++] = static_cast<uint16_t>(at);
      at += window.sizes[at];
    }
    window.bursts = found;
    window.end = at;
  }
  __syncthreads();
}

static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    decode_bursts(Segments segments, const uint8_t* payloads, float* out, DecodeMode mode,
                  DecodedSegment* decoded, CodedChunks chunks) {
  __shared__ BurstWindow window;
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const uint64_t begin = chunks.begin[blockIdx.x];
  if (begin == kUncoded) return skip_chunk(chunk, decoded[chunk.index], out, mode);
  const uint8_t* bytes = payloads + begin;
  const uint32_t size = chunks.size[blockIdx.x];
  const auto bursts = static_cast<uint32_t>((chunk.n + kBurstValues - 1) / kBurstValues);
  uint32_t wrong = 0;
  uint32_t at = 0;
  uint32_t burst = 0;
  while (burst < bursts) {
    find_bursts(bytes + at, size - at, bursts - burst, window);
    const uint32_t found = window.bursts;
    const uint32_t end = window.end;
    if (end > size - at) break;
    for (uint32_t i = threadIdx.x; i < found * kBurstValues; i += kThreads) {
      const uint8_t* from = window.bytes + window.begin[i / kBurstValues];
      const uint32_t tags = tags_at(from);
      const auto shift = static_cast<uint32_t>(2 * (i % kBurstValues));
      const uint32_t tag = tags >> shift & 3u;
      const auto value = static_cast<uint32_t>(burst * kBurstValues + i);
      if (value >= chunk.n) {
        wrong |= tag;
        continue;
      }
      from += kBurstTagBytes + clip_codes_size(tags & ((1u << shift) - 1));
      uint32_t code = 0;
      for (uint32_t byte = 0; byte < clip_size(tag); ++byte) {
        code |= static_cast<uint32_t>(from[byte]) << 8 * byte;
      }
      float& to = out[chunk.begin + value];
      to = mode == DecodeMode::kStore ? clip_value(tag, code) : to + clip_value(tag, code);
    }
    at += end;
    burst += found;
    __syncthreads();
  }
  wrong |= burst != bursts || at != size;
  if (block_max(wrong, shared) != 0 && threadIdx.x == 0) decoded[chunk.index].valid = 0;
}

}  // namespace gradwire::cuda
