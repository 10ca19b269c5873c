#pragma once

// The levels of a chunk in shared memory, and their packing into equal bits (spec/format.md, qsgd).

#include <cstdint>

#include "cuda/coded/chunk_places.cuh"
#include "cuda/common/draws.cuh"
#include "cuda/levels/level_steps.cuh"

namespace gradwire::cuda {

// level + s of each value of a chunk, a byte each, and a word after them that copy_out may read.
struct LevelBytes {
  uint32_t words[kChunkValues / 4 + 1];
};

// Quantizes a chunk. false: nothing of its segment is sent. After the last value, up to a multiple
// of kUnrolled * kThreads, bytes are 0.
__device__ inline bool quantize_chunk(const Chunk& chunk, int32_t levels, const Encoding& encoding,
                                      const LevelStep* steps, LevelBytes& bytes) {
  if (encoding.refuse(chunk, kNonFiniteBits)) return false;
  const ScaleOf scale_of(chunk);
  const DrawStream stream = draw_stream_of(encoding.draw, chunk.segment);
  auto* out = reinterpret_cast<uint8_t*>(bytes.words);
  uint32_t words[kUnrolled];
  encoding.input.replace(
      chunk.begin, chunk.n, [&](uint32_t at) { draw_words(stream, chunk.first + at, words); },
      [&](uint32_t i, uint32_t at, float b) {
        if (at >= chunk.n) {
          out[at] = 0;
          return 0.0f;
        }
        const LevelStep step = steps[chunk.segment.first_scale + scale_of(at)];
        const int32_t level = step.unit == 0.0f ? 0 : level_of(b, step.scale, words[i]);
        out[at] = static_cast<uint8_t>(level + levels);
        return b - level_value(level, step.unit);
      });
  __syncthreads();
  // Of zeros only a header is sent. The residual was stored all the same, as x may cancel it.
  return encoding.magnitudes.of_segment[chunk.index] != 0;
}

// Eight levels + s, a byte each, become 8 * width bits.
__device__ inline uint64_t pack_eight(uint64_t bytes, int width) {
  uint64_t bits = (bytes & 0x00ff00ff00ff00ffu) | (bytes & 0xff00ff00ff00ff00u) >> (8 - width);
  bits = (bits & 0x0000ffff0000ffffu) | (bits & 0xffff0000ffff0000u) >> (16 - 2 * width);
  return (bits & 0x00000000ffffffffu) | (bits & 0xffffffff00000000u) >> (32 - 4 * width);
}

// Packs levels in place. A row of kThreads times eight levels is written to where only this row and
// the rows before it were.
__device__ inline void pack_levels(LevelBytes& levels, uint32_t n, int width) {
  auto* out = reinterpret_cast<uint8_t*>(levels.words);
  for (uint32_t base = 0; base < n; base += 8 * kThreads) {
    const uint32_t first = base + 8 * threadIdx.x;
    uint64_t eight = 0;
    if (first < n) {
      eight = levels.words[first / 4] | static_cast<uint64_t>(levels.words[first / 4 + 1]) << 32;
    }
    __syncthreads();
    if (first >= n) continue;
    const uint64_t bits = pack_eight(eight, width);
    uint8_t* to = out + first / 8 * static_cast<uint32_t>(width);
    for (int i = 0; i < width; ++i) to[i] = static_cast<uint8_t>(bits >> 8 * i);
  }
  __syncthreads();
}

// Quantizes, packs and writes a chunk, whose place is fixed.
static GW_KERNEL void encode_fixed_levels(Segments segments, Encoding encoding, int32_t levels,
                                          const LevelStep* steps) {
  __shared__ LevelBytes bytes;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  if (!quantize_chunk(chunk, levels, encoding, steps, bytes)) return;
  const int width = level_width(levels);
  pack_levels(bytes, chunk.n, width);
  const Segment& segment = chunk.segment;
  copy_out(bytes.words, segment.room(chunk.of_segment),
           encoding.payload(chunk) + segment.scales_size +
               uint64_t{segment.full_room} * chunk.of_segment);
  if (chunk.of_segment == 0 && threadIdx.x == 0) {
    encoding.encoded[chunk.index].size = segment.largest_size;
  }
}

}  // namespace gradwire::cuda
