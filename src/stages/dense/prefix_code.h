#pragma once

// The prefix code (Huffman) of a dense chunk: one symbol for each number of bits that a step may
// have, 0 to 32.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace gradwire {

inline constexpr int kMostStepBits = 32;
inline constexpr size_t kMostSymbols = kMostStepBits + 1;
inline constexpr int kLongestPrefix = 11;

// By symbol: the length of its code, 0 for a symbol that does not occur.
struct PrefixLengths {
  uint8_t of[kMostSymbols] = {};

  // Codes of at most kLongestPrefix bits, of which none is much longer than the symbol's share of
  // the counts asks for. At least one count is not 0.
  static PrefixLengths create(std::span<const uint32_t> counts);
  // Whether the codes are complete; a code of a single symbol has one bit.
  [[nodiscard]] bool valid() const;
};

// By symbol: its code, the bit that is read first the lowest. Codes are canonical: numbered by
// length, then by symbol, from the highest bit on.
struct PrefixCodes {
  uint16_t of[kMostSymbols] = {};

  explicit PrefixCodes(const PrefixLengths& lengths);
};

// By the next kLongestPrefix bits: the symbol and its code's length. Length 0: no code begins so.
struct PrefixTable {
  struct Entry {
    uint8_t symbol = 0;
    uint8_t length = 0;
  };
  Entry of[size_t{1} << kLongestPrefix] = {};

  explicit PrefixTable(const PrefixLengths& lengths);
};

}  // namespace gradwire
