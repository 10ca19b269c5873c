#pragma once

// Places: which of n <= 65536 bits are set (spec/format.md, Delta). The bits are cut into runs with
// a string each, so that a decoder reads several strings at once: the gaps between the set bits in
// Golomb-Rice code, and the gap before the run's end.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "stages/rice/rice.h"
#include "stages/trits/trit_bits.h"

namespace gradwire {

inline constexpr size_t kMostPlaces = kMostRiceTrits;  // n
// Four runs where so many bits are set, and one where fewer are.
inline constexpr size_t kPlaceRuns = 4;
inline constexpr size_t kLeastInRuns = 512;
constexpr size_t place_runs(size_t count) {
  return count == 0 ? 0 : count < kLeastInRuns ? 1 : kPlaceRuns;
}

// Runs begin at words. The last ones may be shorter or empty.
constexpr size_t place_run_words(size_t n, size_t runs) {
  return (trit_words(n) + runs - 1) / runs;
}

// A code has no sign, but is otherwise that of the coder rice.
inline constexpr int kLongestGapCode = kRiceLongestCode - 1;
GW_HOST_DEVICE inline int gap_length(uint32_t gap, int k) { return rice_length(gap, k) - 1; }
GW_HOST_DEVICE inline RiceCode gap_code(uint32_t gap, int k) {
  const uint32_t quotient = gap >> k;
  if (quotient >= kRiceEscape) return {gap << kRiceEscape, kLongestGapCode};
  const uint32_t low = gap - (quotient << k);
  return {(low << 1 | 1) << quotient, static_cast<int>(quotient) + k + 1};
}

// The parameters that an encoder tries for `count` gaps with this sum: up to the bits of their
// mean, without the highest.
struct GapChoices {
  int first;
  int last;

  GapChoices(size_t sum, size_t count) {
    int bits = 0;
    for (size_t mean = sum / count; mean != 0; mean >>= 1) ++bits;
    last = std::max(bits - 1, 0);
    first = std::max(bits - kTried, 0);
  }

 private:
  static constexpr int kTried = 4;
};

// Bytes that encode_places may write for so many set bits, those after the last code included.
constexpr size_t places_room(size_t count) {
  return (count + kPlaceRuns) * kLongestGapCode / 8 + 64;
}

}  // namespace gradwire
