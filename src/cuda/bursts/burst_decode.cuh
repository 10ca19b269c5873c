#pragma once

// From bursts to values (spec/format.md, inceptionn). Any bytes are safe. Each burst says where the
// next one begins. So for a window of a chunk's bytes, all threads find how long a burst at each
// place would be, one thread goes from burst to burst, and all decode the bursts that it met.

#include <cstdint>

#include "cuda/coded/coded_decode.cuh"
#include "stages/float_clip/float_clip.h"

namespace gradwire::cuda {

inline constexpr uint32_t kWindowBytes = 4096;
inline constexpr uint32_t kWindowBursts = kWindowBytes / kBurstTagBytes;

struct BurstWindow {
  uint8_t bytes[kWindowBytes + kMaxBurstSize];  // bursts begin in the first kWindowBytes
  uint8_t sizes[kWindowBytes];                  // of a burst that would begin there
  uint16_t begin[kWindowBursts];                // of the bursts in the window
  uint32_t bursts;
  uint32_t end;  // of the last burst
};

__device__ inline uint32_t tags_at(const uint8_t* bytes) {
  return bytes[0] | static_cast<uint32_t>(bytes[1]) << 8;
}

// Finds at most `most` bursts in a window; the first begins at its front. Zeros follow the last
// byte.
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

static GW_KERNEL void decode_bursts(Segments segments, Decoding decoding) {
  __shared__ BurstWindow window;
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const uint8_t* bytes = decoding.bytes_of(chunk);
  if (bytes == nullptr) return;
  const uint32_t size = decoding.size[chunk.number];
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
      float& to = decoding.out[chunk.begin + value];
      to = decoding.mode == DecodeMode::kStore ? clip_value(tag, code) : to + clip_value(tag, code);
    }
    at += end;
    burst += found;
    __syncthreads();
  }
  wrong |= burst != bursts || at != size;
  if (block_max(wrong, shared) != 0 && threadIdx.x == 0) decoding.refuse(chunk);
}

}  // namespace gradwire::cuda
