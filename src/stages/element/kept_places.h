#pragma once

// A table that moves the set lanes of a mask together.

#include <cstdint>

namespace gradwire {

// places[mask]: the set bits of mask in ascending order, then zeros.
struct Kept {
  alignas(64) uint8_t places[256][8] = {};
  constexpr Kept() {
    for (int mask = 0; mask < 256; ++mask) {
      int count = 0;
      for (int bit = 0; bit < 8; ++bit) {
        if ((mask >> bit & 1) != 0) places[mask][count++] = static_cast<uint8_t>(bit);
      }
    }
  }
};
inline constexpr Kept kKept;

}  // namespace gradwire
