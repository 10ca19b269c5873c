#pragma once

// From payloads of levels to values (spec/format.md, qsgd). Any bytes are safe.

#include <cfloat>
#include <cstdint>

#include "codecs/qsgd/qsgd.h"
#include "cuda/coded_chunks.cuh"
#include "cuda/level_steps.cuh"
#include "cuda/unaligned.cuh"
#include "stages/elias.h"
#include "stages/levels.h"

namespace gradwire::cuda {

struct LevelLayout {
  int32_t levels;
  LevelCoder coder;

  __device__ static uint64_t head(const Segment& segment) {
    return 4 * static_cast<uint64_t>(segment.scales);
  }
  __device__ uint32_t room(uint32_t n) const {
    return static_cast<uint32_t>(coder == LevelCoder::kFixed
                                     ? packed_levels_size(n, level_width(levels))
                                 : coder == LevelCoder::kSparse ? sparse_levels_room(n, levels)
                                                                : dense_levels_room(n, levels));
  }
  __device__ uint32_t least(uint32_t n) const {
    return static_cast<uint32_t>(coder == LevelCoder::kFixed    ? room(n)
                                 : coder == LevelCoder::kSparse ? sparse_levels_least(n)
                                                                : dense_levels_least(n));
  }
  __device__ static uint64_t extra() { return 0; }
  GW_HOST_DEVICE bool varying() const { return coder != LevelCoder::kFixed; }
  __device__ static bool empty_is_zeros() { return true; }
};

// Scratch of a call.
struct LevelDecodeScratch {
  CodedChunks chunks;
  float* units;   // of each scale
  uint32_t* any;  // of each segment: whether one of its units is not 0
};

// Before the first kernel of a call.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    clear_any(Segments segments, uint32_t* any) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < segments.count) any[i] = 0;
}

// Each unit finite with its sign bit clear, so is s times it.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    read_units(Segments segments, const uint8_t* payloads, const PayloadPlace* places,
               int32_t levels, DecodedSegment* decoded, LevelDecodeScratch scratch) {
  const uint64_t number = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (number >= segments.scales) return;
  const auto scale = static_cast<uint32_t>(number);
  const uint32_t index = segment_of_scale(segments, scale);
  const Segment segment = segments.segments[index];
  if (scratch.chunks.begin[segment.first_chunk] == kUncoded) return;
  const uint32_t bits = load_word<uint32_t>(payloads + places[index].begin +
                                            4 * uint64_t{scale - segment.first_scale});
  scratch.units[scale] = float_of(bits);
  if (bits >= kNonFiniteBits || float_of(bits) * static_cast<float>(levels) > FLT_MAX) {
    atomicExch(&decoded[index].valid, 0u);
  }
  if (bits != 0 && *static_cast<volatile uint32_t*>(&scratch.any[index]) == 0) {
    atomicExch(&scratch.any[index], 1u);
  }
}

// Stores or adds a level.
__device__ inline void put_level(float& value, int32_t level, float unit, DecodeMode mode) {
  value = mode == DecodeMode::kStore ? level_value(level, unit) : value + level_value(level, unit);
}

static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    decode_fixed_levels(Segments segments, const uint8_t* payloads, int32_t levels, float* out,
                        DecodeMode mode, DecodedSegment* decoded, LevelDecodeScratch scratch) {
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const uint64_t begin = scratch.chunks.begin[blockIdx.x];
  if (begin == kUncoded) return skip_chunk(chunk, decoded[chunk.index], out, mode);
  const auto width = static_cast<uint32_t>(level_width(levels));
  const uint8_t* bytes = payloads + begin;
  const ScaleOf scale_of(chunk);
  uint32_t wrong = scratch.any[chunk.index] == 0;
#pragma unroll 4
  for (uint32_t at = threadIdx.x; at < chunk.n; at += kThreads) {
    const uint32_t bit = at * width;
    uint32_t code = bytes[bit / 8];
    if (bit % 8 + width > 8) code |= static_cast<uint32_t>(bytes[bit / 8 + 1]) << 8;
    code = code >> bit % 8 & ((1u << width) - 1);
    const int32_t level = static_cast<int32_t>(code) - levels;
    wrong |= level > levels;
    put_level(out[chunk.begin + at], level, scratch.units[chunk.segment.first_scale + scale_of(at)],
              mode);
  }
  const uint32_t used = chunk.n * width % 8;  // of the last byte
  if (used != 0) wrong |= bytes[chunk.n * width / 8] >> used;
  if (block_max(wrong, shared) != 0 && threadIdx.x == 0) decoded[chunk.index].valid = 0;
}

}  // namespace gradwire::cuda
