#pragma once

// From payloads of levels to values (spec/format.md, qsgd). Any bytes are safe.

#include <cfloat>
#include <cstdint>

#include "codecs/qsgd/qsgd.h"
#include "cuda/coded/coded_decode.cuh"
#include "stages/elias/elias.h"
#include "stages/levels/levels.h"

namespace gradwire::cuda {

// Levels of one width, as fixed_decode.cuh takes them. Their scales, as those of levels in Elias
// codes, are units, and s times a unit is finite, too.
struct LevelFormat : FloatScales {
  static constexpr bool kSparse = false;

  int32_t levels;
  uint32_t width;

  __device__ bool valid(const uint8_t* unit, bool& any) const {
    return FloatScales::valid(unit, any) && load(unit) * static_cast<float>(levels) <= FLT_MAX;
  }

  // The code lies in one byte or two.
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
