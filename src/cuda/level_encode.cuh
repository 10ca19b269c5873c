#pragma once

// The levels of a chunk in shared memory, and in equal bits (spec/format.md, qsgd).

#include <cstdint>

#include "cuda/compaction.cuh"
#include "cuda/draws.cuh"
#include "cuda/level_steps.cuh"
#include "stages/levels.h"

namespace gradwire::cuda {

// Scratch of a call, zeros before the first kernel but for steps and squares.
struct LevelScratch {
  Magnitudes magnitudes;
  LevelStep* steps;  // of each scale
  double* squares;   // of parts; or nullptr
  uint64_t* told;    // of each chunk (compaction.cuh); or nullptr
  uint32_t* ticket;
};

// level + s of each value of a chunk, a byte each, and a word behind that copy_out may read.
struct LevelBytes {
  uint32_t words[kChunkValues / 4 + 1];
};

// Quantizes a chunk. false: nothing of its segment is sent. Behind the last value, up to a multiple
// of kUnrolled * kThreads, come bytes 0.
__device__ inline bool quantize_chunk(const Chunk& chunk, const Input& input, int32_t levels,
                                      const DrawContext& draw, const LevelScratch& scratch,
                                      EncodedSegment* encoded, LevelBytes& bytes) {
  const uint32_t largest = scratch.magnitudes.of_segment[chunk.index];
  if (largest >= kNonFiniteBits) {
    tell_non_finite(chunk, input, kNonFiniteBits, encoded);
    return false;
  }
  const ScaleOf scale_of(chunk);
  const DrawStream stream =
      DrawStream::create(draw.seed, draw.stream + chunk.segment.stream, draw.step);
  auto* out = reinterpret_cast<uint8_t*>(bytes.words);
  uint32_t words[kUnrolled];
  input.replace(
      chunk.begin, chunk.n, [&](uint32_t at) { draw_words(stream, chunk.first + at, words); },
      [&](uint32_t i, uint32_t at, float b) {
        if (at >= chunk.n) {
          out[at] = 0;
          return 0.0f;
        }
        const LevelStep step = scratch.steps[chunk.segment.first_scale + scale_of(at)];
        const int32_t level = step.unit == 0.0f ? 0 : level_of(b, step.scale, words[i]);
        out[at] = static_cast<uint8_t>(level + levels);
        return b - level_value(level, step.unit);
      });
  __syncthreads();
  return largest != 0;  // else a residual that is cancelled is 0
}

// Eight levels + s, a byte each, become 8 * width bits.
__device__ inline uint64_t pack_eight(uint64_t bytes, int width) {
  uint64_t bits = (bytes & 0x00ff00ff00ff00ffu) | (bytes & 0xff00ff00ff00ff00u) >> (8 - width);
  bits = (bits & 0x0000ffff0000ffffu) | (bits & 0xffff0000ffff0000u) >> (16 - 2 * width);
  return (bits & 0x00000000ffffffffu) | (bits & 0xffffffff00000000u) >> (32 - 4 * width);
}

// Packs levels where they stand. A row of kThreads times eight goes to where only it and rows
// before have been.
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

// Quantizes, packs and writes a chunk: all have their place.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    encode_fixed_levels(Segments segments, Input input, int32_t levels, DrawContext draw,
                        uint8_t* payloads, EncodedSegment* encoded, LevelScratch scratch) {
  __shared__ LevelBytes bytes;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  if (!quantize_chunk(chunk, input, levels, draw, scratch, encoded, bytes)) return;
  const int width = level_width(levels);
  pack_levels(bytes, chunk.n, width);
  const uint64_t begin = 4 * static_cast<uint64_t>(chunk.segment.scales) +
                         chunk.of_segment * packed_levels_size(kChunkValues, width);
  const auto size = static_cast<uint32_t>(packed_levels_size(chunk.n, width));
  copy_out(bytes.words, size, payloads + chunk.segment.payload + begin);
  if (threadIdx.x == 0 && chunk.of_segment + 1 == chunk.segment.chunks)
    encoded[chunk.index].size = begin + size;
}

// Before the first kernel of a call.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    clear_level_scratch(Segments segments, EncodedSegment* encoded, LevelScratch scratch) {
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  clear_at(i, segments, encoded, scratch.magnitudes);
  if (scratch.told != nullptr && i < segments.chunks) scratch.told[i] = 0;
  if (i == 0) *scratch.ticket = 0;
}

}  // namespace gradwire::cuda
