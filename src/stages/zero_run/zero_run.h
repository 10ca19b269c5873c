#pragma once

// Zero-run coding of packed trits (3LC, section 3.3), one code.

#include <cstddef>
#include <cstdint>

#include "stages/trits/trit.h"

namespace gradwire {

// kRunBase + (k - kShortestRun) stands for k bytes kZeroByte, k = 2..14.
inline constexpr uint8_t kRunBase = 243;
inline constexpr int kShortestRun = 2;
inline constexpr int kLongestRun = 14;
// Longest input of the kernel zero_run_encode: the packed bytes of one chunk.
inline constexpr size_t kMaxRunInput = 8192;

// Packed bytes that one code of the zero-run coding stands for.
GW_HOST_DEVICE constexpr int run_length_of(uint8_t code) {
  return code < kRunBase ? 1 : code - kRunBase + kShortestRun;
}

// The code of a zero run of k = 1..14 bytes; a lone zero byte stays.
GW_HOST_DEVICE constexpr uint8_t run_code(int k) {
  return k < kShortestRun ? kZeroByte : static_cast<uint8_t>(kRunBase + (k - kShortestRun));
}

}  // namespace gradwire
