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

// Of Elias codes.
struct LevelLayout {
  int32_t levels;
  LevelCoder coder;

  __device__ static uint64_t head(const Segment& segment) {
    return 4 * static_cast<uint64_t>(segment.scales);
  }
  __device__ uint32_t room(uint32_t n) const {
    return static_cast<uint32_t>(coder == LevelCoder::kSparse ? sparse_levels_room(n, levels)
                                                              : dense_levels_room(n, levels));
  }
  __device__ uint32_t least(uint32_t n) const {
    return static_cast<uint32_t>(coder == LevelCoder::kSparse ? sparse_levels_least(n)
                                                              : dense_levels_least(n));
  }
  __device__ static uint64_t extra() { return 0; }
  __device__ static bool varying() { return true; }
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

// Finite with its sign bit clear, so is s times it.
__device__ inline bool valid_unit(uint32_t bits, int32_t levels) {
  return bits < kNonFiniteBits && float_of(bits) * static_cast<float>(levels) <= FLT_MAX;
}

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
  if (!valid_unit(bits, levels)) atomicExch(&decoded[index].valid, 0u);
  if (bits != 0 && *static_cast<volatile uint32_t*>(&scratch.any[index]) == 0) {
    atomicExch(&scratch.any[index], 1u);
  }
}

// Stores or adds a level.
__device__ inline void put_level(float& value, int32_t level, float unit, DecodeMode mode) {
  value = mode == DecodeMode::kStore ? level_value(level, unit) : value + level_value(level, unit);
}

// Levels of one width, as fixed_decode.cuh takes them.
struct LevelFormat {
  static constexpr uint32_t kScaleBytes = sizeof(float);
  static constexpr bool kEmptyIsZero = true;
  static constexpr bool kSparse = false;
  using Scale = float;  // the unit

  int32_t levels;
  uint32_t width;

  GW_HOST_DEVICE uint64_t bytes(uint64_t n) const {
    return packed_levels_size(n, static_cast<int>(width));
  }
  __device__ bool valid(const uint8_t* unit, bool& any) const {
    const auto bits = load_word<uint32_t>(unit);
    any = bits != 0;
    return valid_unit(bits, levels);
  }
  __device__ static Scale load(const uint8_t* unit) { return float_of(load_word<uint32_t>(unit)); }

  // One byte or two.
  __device__ uint32_t code(const uint8_t* values, uint32_t at) const {
    const uint32_t bit = at * width;
    uint32_t code = values[bit / 8];
    if (bit % 8 + width > 8) code |= static_cast<uint32_t>(values[bit / 8 + 1]) << 8;
    return code;
  }
  __device__ int32_t level(uint32_t code, uint32_t at) const {
    return static_cast<int32_t>(code >> at * width % 8 & ((1u << width) - 1)) - levels;
  }
  __device__ bool valid_code(uint32_t code, uint32_t at) const { return level(code, at) <= levels; }
  // There are zeros.
  __device__ bool valid_end(uint32_t code, uint32_t n) const {
    return code >> ((n - 1) * width % 8 + width) == 0;
  }
  __device__ float value(uint32_t code, uint32_t at, Scale unit) const {
    return level_value(level(code, at), unit);
  }
};

}  // namespace gradwire::cuda
