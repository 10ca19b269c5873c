#pragma once

#include <cstdint>

#include "codecs/qsgd/qsgd_shape.h"

namespace gradwire {

enum class Norm : uint8_t { kMax = 0, kL2 = 1 };

struct QsgdParameters {
  int32_t levels = 7;  // s
  LevelCoder coder = LevelCoder::kFixed;
  Norm norm = Norm::kMax;  // only the encoder uses it
  uint32_t group_size = 512;

  [[nodiscard]] QsgdShape shape(uint64_t n) const { return {n, levels, coder, group_size}; }
};

}  // namespace gradwire
