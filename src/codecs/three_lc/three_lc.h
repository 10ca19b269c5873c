#pragma once

#include <cstdint>

#include "gradwire/codec.h"

namespace gradwire {

// Values and packed bytes of one chunk: the unit that threads take, coded by itself.
inline constexpr uint64_t kChunkValues = 40960;
inline constexpr uint64_t kChunkBytes = kChunkValues / 5;

enum class TernaryCoder : uint8_t { kNone = 0, kZeroRun = 1 };

struct ThreeLcParameters {
  float sparsity = 1.0f;  // s, in [1, 2); the encoder's business alone
  TernaryCoder coder = TernaryCoder::kZeroRun;
  uint32_t bucket = 0;  // values that share a scale, a multiple of 5; 0: the whole segment
};

}  // namespace gradwire
