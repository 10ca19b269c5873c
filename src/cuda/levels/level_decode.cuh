#pragma once

// From payloads of levels to values (spec/format.md, qsgd). Any bytes are safe.

#include <cfloat>
#include <cstdint>

#include "codecs/qsgd/qsgd.h"
#include "cuda/coded/coded_decode.cuh"
#include "stages/elias/elias.h"
#include "stages/levels/levels.h"

namespace gradwire::cuda {

// The units of levels (payloads.cuh).
struct LevelUnits {
  static constexpr uint32_t kScaleBytes = sizeof(float);

  int32_t levels;

  // Finite with a clear sign bit, and so is s times the unit.
  __device__ bool valid(const uint8_t* unit, bool& any) const {
    const auto bits = load_word<uint32_t>(unit);
    any = bits != 0;
    return bits < kNonFiniteBits && float_of(bits) * static_cast<float>(levels) <= FLT_MAX;
  }
};

// Payloads of Elias codes (coded_layout.cuh).
struct LevelLayout : LevelUnits {
  static constexpr uint64_t kExtra = 0;
  static constexpr bool kEmptyIsZeros = true;

  LevelCoder coder;

  __device__ uint32_t room(uint32_t n) const {
    return static_cast<uint32_t>(coder == LevelCoder::kSparse ? sparse_levels_room(n, levels)
                                                              : dense_levels_room(n, levels));
  }
  __device__ uint32_t least(uint32_t n) const {
    return static_cast<uint32_t>(coder == LevelCoder::kSparse ? sparse_levels_least(n)
                                                              : dense_levels_least(n));
  }
  __device__ static bool varying() { return true; }
};

// Stores or adds a level.
__device__ inline void put_level(float& value, int32_t level, float unit, DecodeMode mode) {
  value = mode == DecodeMode::kStore ? level_value(level, unit) : value + level_value(level, unit);
}

// Levels of one width, as fixed_decode.cuh takes them.
struct LevelFormat : LevelUnits {
  static constexpr bool kEmptyIsZero = true;
  static constexpr bool kSparse = false;
  using Scale = float;  // the unit

  uint32_t width;

  GW_HOST_DEVICE uint64_t bytes(uint64_t n) const {
    return packed_levels_size(n, static_cast<int>(width));
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
  // The bits after the last level are 0.
  __device__ bool valid_end(uint32_t code, uint32_t n) const {
    return code >> ((n - 1) * width % 8 + width) == 0;
  }
  __device__ float value(uint32_t code, uint32_t at, Scale unit) const {
    return level_value(level(code, at), unit);
  }
};

}  // namespace gradwire::cuda
