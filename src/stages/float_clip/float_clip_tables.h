#pragma once

// Constant tables of stages/float_clip/float_clip-inl.h, made at compile time.

#include <cstdint>

#include "stages/float_clip/float_clip.h"

namespace gradwire {

// For the tags of four values: the places that bytes come from in packing and in unpacking (0x80:
// no byte), and the number of kept bytes.
struct ClipTable {
  alignas(64) uint8_t pack[256][16] = {};
  alignas(64) uint8_t unpack[256][16] = {};
  alignas(64) uint8_t size[256] = {};
  constexpr ClipTable() {
    for (int tags = 0; tags < 256; ++tags) {
      uint8_t count = 0;
      for (int byte = 0; byte < 16; ++byte) {
        const uint32_t tag = static_cast<uint32_t>(tags) >> byte / 4 * 2 & 3u;
        unpack[tags][byte] = 0x80;
        if (!keeps(tag, byte % 4)) continue;
        pack[tags][count] = static_cast<uint8_t>(byte);
        unpack[tags][byte] = count++;
      }
      size[tags] = count;
    }
  }
  // Whether a code keeps `byte` 0 to 3 of its lane, 0 the lowest.
  static constexpr bool keeps(uint32_t tag, int byte) {
    return tag == kClip32 || (byte == 2 && tag != kClipNone) || (byte == 1 && tag == kClip16);
  }
};
inline constexpr ClipTable kClipTable;

}  // namespace gradwire
