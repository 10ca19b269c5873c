#pragma once

// The code of sparse trits (spec/format.md, Coder rice), one non-zero at a time. The gaps between
// non-zeros go in Golomb-Rice code, with the best k for each 32 non-zeros.

#include <cstdint>

#include "base/host_device.h"

namespace gradwire {

// Number of non-zeros that share a k, which is written before them.
inline constexpr int kRiceGroup = 32;
inline constexpr int kRiceHeadBits = 4;
inline constexpr int kRiceChoices = 1 << kRiceHeadBits;
// This many zero bits stand for an escape: the gap follows in kRiceGapBits bits.
inline constexpr int kRiceEscape = 11;
inline constexpr int kRiceGapBits = 16;
inline constexpr int kRiceLongestCode = kRiceEscape + 1 + kRiceGapBits;
inline constexpr int kRiceLongestGroup = kRiceHeadBits + kRiceGroup * kRiceLongestCode;
// Most trits that are coded together, so that each gap fits.
inline constexpr uint64_t kMostRiceTrits = uint64_t{1} << kRiceGapBits;
// Fewer bits than this follow the last code, and they are all 0. Every code has a 1 in its first 11
// bits or is longer, so this padding cannot be taken for a code.
inline constexpr int kRicePadding = 8;

// The first bit of a code is the lowest.
struct RiceCode {
  uint32_t bits;
  int length;
};

// Length of the code of a non-zero after `gap` zeros, gap < 2^16.
GW_HOST_DEVICE inline int rice_length(uint32_t gap, int k) {
  const uint32_t quotient = gap >> k;
  return quotient < kRiceEscape ? static_cast<int>(quotient) + k + 2 : kRiceLongestCode;
}

// quotient zeros, 1, sign, k bits remainder; or 11 zeros, sign, 16 bits gap. sign: 1 for -1.
GW_HOST_DEVICE inline RiceCode rice_code(uint32_t gap, uint32_t sign, int k) {
  const uint32_t quotient = gap >> k;
  if (quotient >= kRiceEscape) {
    return {(gap << 1 | sign) << kRiceEscape, kRiceLongestCode};
  }
  const uint32_t remainder = gap - (quotient << k);
  return {((remainder << 1 | sign) << 1 | 1) << quotient, static_cast<int>(quotient) + k + 2};
}

}  // namespace gradwire
