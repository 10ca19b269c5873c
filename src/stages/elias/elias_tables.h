#pragma once

// Tables that encode and decode Elias codes; stages/elias/elias.h defines the codes.

#include <array>
#include <cstddef>
#include <cstdint>

#include "stages/elias/elias.h"

namespace gradwire {

// The codes of small distances, and the two codes of each level; the index is the level as a uint8.
struct EliasCodes {
  static constexpr uint32_t kDistances = 256;
  std::array<BitCode, kDistances> distance{};  // [0] is no code
  std::array<BitCode, 256> sparse{};           // [0] is no code
  std::array<BitCode, 256> dense{};

  constexpr EliasCodes() {
    for (uint32_t k = 1; k < kDistances; ++k) distance[k] = elias_code(k);
    for (int level = -kLargestByteLevel; level <= kLargestByteLevel; ++level) {
      const auto at = static_cast<size_t>(static_cast<uint8_t>(level));
      if (level != 0) sparse[at] = sparse_level_code(level);
      dense[at] = dense_level_code(level);
    }
  }
};
inline constexpr EliasCodes kEliasCodes;

// The meaning of the next bits of sparse levels: a distance, then a level. length 0: they need more
// bits than the table looks at.
struct SparseEntry {
  uint16_t distance;
  int8_t level;
  uint8_t length;
};

struct SparseTable {
  static constexpr int kBits = 12;
  std::array<SparseEntry, size_t{1} << kBits> of{};

  constexpr SparseTable() {
    for (size_t bits = 0; bits < of.size(); ++bits) {
      const uint64_t window = uint64_t{bits} << (64 - kBits);
      const EliasNumber distance = elias_read(window);
      const EliasLevel level = sparse_level_read(window << distance.length);
      const int length = distance.length + level.length;
      if (distance.length == 0 || level.length == 0 || length > kBits) continue;
      of[bits] = {static_cast<uint16_t>(distance.value), static_cast<int8_t>(level.level),
                  static_cast<uint8_t>(length)};
    }
  }
};
inline constexpr SparseTable kSparseTable;

// The meaning of the next bits of dense levels: up to six levels. count 0: the first level needs
// more bits than the table looks at.
struct DenseEntry {
  int8_t level[6];
  uint8_t count;
  uint8_t length;
};

struct DenseTable {
  static constexpr int kBits = 11;
  std::array<DenseEntry, size_t{1} << kBits> of{};

  constexpr DenseTable() {
    for (size_t bits = 0; bits < of.size(); ++bits) {
      DenseEntry& entry = of[bits];
      uint64_t window = uint64_t{bits} << (64 - kBits);
      while (entry.count < 6) {
        const EliasLevel next = dense_level_read(window);
        if (next.length == 0 || entry.length + next.length > kBits) break;
        entry.level[entry.count] = static_cast<int8_t>(next.level);
        entry.count = static_cast<uint8_t>(entry.count + 1);
        entry.length = static_cast<uint8_t>(entry.length + next.length);
        window <<= next.length;
      }
    }
  }
};
inline constexpr DenseTable kDenseTable;

}  // namespace gradwire
