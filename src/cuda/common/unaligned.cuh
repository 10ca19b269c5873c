#pragma once

// Words of payloads, which lie at any address. The words of a warp are either all aligned or all
// not, so aligned ones cost one access.

#include <cstdint>

#include "cuda/common/launch.h"

namespace gradwire::cuda {

template <typename T>
__device__ T load_word(const uint8_t* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0) return *reinterpret_cast<const T*>(at);
  T word = 0;
  for (unsigned i = 0; i < sizeof(T); ++i) {
    word = static_cast<T>(word | static_cast<T>(static_cast<T>(at[i]) << 8 * i));
  }
  return word;
}

template <typename T>
__device__ void store_word(uint8_t* at, T word) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0) {
    *reinterpret_cast<T*>(at) = word;
    return;
  }
  for (unsigned i = 0; i < sizeof(T); ++i) at[i] = static_cast<uint8_t>(word >> 8 * i);
}

}  // namespace gradwire::cuda
