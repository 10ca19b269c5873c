#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codecs/chunked_codec.h"
#include "stages/kernels.h"

namespace gradwire {

// How levels become bytes. Headers hold these numbers.
enum class LevelCoder : uint8_t {
  kFixed = 0,   // each level takes the same number of bits
  kSparse = 1,  // Elias codes of the levels that are not 0, and of their distances
  kDense = 2,   // Elias codes of all levels
};

// Payload of levels times units (spec/format.md, qsgd):
//   unit f32 of each group | sizes of the chunks | chunks of coded levels
struct QsgdShape : ChunkedShape {
  int32_t levels;  // the largest, s
  LevelCoder coder;

  // group_size: values that share a unit, a multiple of 8.
  QsgdShape(uint64_t n, int32_t s, LevelCoder level_coder, uint64_t group_size);
};

// Codes the n levels of a chunk into `slot`, which has room for them, and returns the size. Levels
// of s above kLargestByteLevel are int16.
uint64_t write_levels(LevelCoder coder, int32_t s, const int8_t* levels, uint64_t n, uint8_t* slot,
                      const Kernels& kernels);
uint64_t write_levels(LevelCoder coder, int32_t s, const int16_t* levels, uint64_t n, uint8_t* slot,
                      const Kernels& kernels);
// Undoes write_levels. false: the bytes don't stand for n levels.
bool read_levels(LevelCoder coder, int32_t s, std::span<const uint8_t> bytes, uint64_t n,
                 int8_t* levels, const Kernels& kernels);
bool read_levels(LevelCoder coder, int32_t s, std::span<const uint8_t> bytes, uint64_t n,
                 int16_t* levels, const Kernels& kernels);

}  // namespace gradwire
