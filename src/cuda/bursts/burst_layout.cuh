#pragma once

#include <cstdint>

#include "cuda/common/launch.h"
#include "stages/float_clip/float_clip.h"

namespace gradwire::cuda {

// Payloads of bursts (coded_layout.cuh).
struct BurstLayout {
  static constexpr uint32_t kScaleBytes = 0;
  static constexpr uint64_t kExtra = 0;
  static constexpr bool kEmptyIsZeros = false;

  __device__ static uint32_t room(uint32_t n) { return least(n) + 4 * n; }
  __device__ static uint32_t least(uint32_t n) {
    return static_cast<uint32_t>((n + kBurstValues - 1) / kBurstValues * kBurstTagBytes);
  }
  __device__ static bool varying() { return true; }
};

}  // namespace gradwire::cuda
