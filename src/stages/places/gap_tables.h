#pragma once

// Gaps of places by the next bits of a string, for small parameters, whose codes are short.

#include <cstddef>
#include <cstdint>

#include "stages/places/places.h"

namespace gradwire {

inline constexpr int kLargestTableK = 5;

struct GapTable {
  static constexpr int kBits = 11;
  static constexpr size_t kSize = size_t{1} << kBits;

  // Up to three codes in the bits: how many bits they take, 0 if there is none; and where their
  // places are after the place that comes next. The last one repeats if there are fewer.
  struct Entry {
    uint8_t length = 0;
    uint8_t places[3] = {};
  };
  Entry entries[kSize] = {};

  constexpr explicit GapTable(int k) {
    for (uint32_t bits = 0; bits < kSize; ++bits) entries[bits] = entry_of(bits, k);
  }

 private:
  static constexpr Entry entry_of(uint32_t bits, int k) {
    Entry entry;
    uint32_t next = 0;  // the place after the last
    for (int i = 0; i < 3; ++i) {
      uint32_t rest = bits >> entry.length;
      int length = k + 1;
      for (; rest != 0 && rest % 2 == 0; rest /= 2) ++length;
      const uint32_t gap =
          static_cast<uint32_t>(length - k - 1) << k | (rest / 2 & ((1u << k) - 1));
      if (rest == 0 || entry.length + length > kBits || next + gap > UINT8_MAX) break;
      entry.length = static_cast<uint8_t>(entry.length + length);
      for (int j = i; j < 3; ++j) entry.places[j] = static_cast<uint8_t>(next + gap);
      next += gap + 1;
    }
    return entry;
  }
};
static_assert(GapTable::kBits <= kRiceEscape, "no entry is an escape");

// By parameter.
struct GapTables {
  GapTable of[kLargestTableK + 1] = {GapTable(0), GapTable(1), GapTable(2),
                                     GapTable(3), GapTable(4), GapTable(5)};
};
inline constexpr GapTables kGapTables;

}  // namespace gradwire
