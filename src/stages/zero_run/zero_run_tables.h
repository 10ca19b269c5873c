#pragma once

// Constant tables of the SIMD kernels, made at compile time.

#include <cstddef>
#include <cstdint>

#include "stages/trits/trit.h"
#include "stages/zero_run/zero_run.h"

namespace gradwire {

// 1, 2, ..., 64
struct Numbers {
  alignas(64) uint8_t of[64] = {};
  constexpr Numbers() {
    for (int i = 0; i < 64; ++i) of[i] = static_cast<uint8_t>(i + 1);
  }
};
inline constexpr Numbers kNumbers;

// The code that ends a zero run at its byte number 1, 2, ..., 127 when runs of 14 are split off.
struct CodeOfPlace {
  alignas(64) uint8_t of[128] = {};
  constexpr CodeOfPlace() {
    for (int place = 1; place < 128; ++place) of[place] = run_code((place - 1) % kLongestRun + 1);
  }
};
inline constexpr CodeOfPlace kCodeOfPlace;

// rows[byte]: its five trits as floats, kZero for trit 0, then zeros; all zero for bytes > 242.
// With -0 as zero, adding a row (times m >= 0) leaves the elements of zero trits as they are.
struct TritRows {
  alignas(64) float rows[256][8] = {};
  constexpr explicit TritRows(float zero) {
    for (int byte = 0; byte <= kLargestPackedByte; ++byte) {
      for (int place = 0; place < kTritsPerByte; ++place) {
        const int trit = trit_at(static_cast<uint8_t>(byte), place);
        rows[byte][place] = trit == 0 ? zero : static_cast<float>(trit);
      }
    }
  }
};
inline constexpr TritRows kRowsToStore(0.0f);
inline constexpr TritRows kRowsToAdd(-0.0f);

// Each eight 16-bit lanes have a 64-bit sum. For each of 32 lanes: the place of the lowest 16 bits
// of the sum of its eight lanes.
struct Eights {
  alignas(64) uint16_t lower[32] = {};
  alignas(64) uint16_t upper[32] = {};
  constexpr Eights() {
    for (int i = 0; i < 32; ++i) {
      lower[i] = static_cast<uint16_t>(i / 8 * 4);
      upper[i] = static_cast<uint16_t>(16 + i / 8 * 4);
    }
  }
};
inline constexpr Eights kEights;

}  // namespace gradwire
