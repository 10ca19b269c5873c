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

// By the next kLongestPrefix bits: the symbols of up to three codes, and how many bits these codes
// and the first of them take. Count 0: no code begins so.
struct SymbolTable {
  static constexpr size_t kSize = size_t{1} << kLongestPrefix;
  static constexpr uint32_t kMost = 3;

  // The symbols in a byte each, the first the lowest, then the numbers in four bits each.
  struct Entry {
    uint32_t bits = 0;

    [[nodiscard]] uint32_t count() const { return bits >> kCountAt & 15; }
    [[nodiscard]] uint32_t length() const { return bits >> kLengthAt; }
  };
  Entry of[kSize] = {};
  // Of the first code, 0 if no code begins so.
  uint8_t first_lengths[kSize] = {};

  explicit SymbolTable(const PrefixLengths& lengths);

 private:
  static constexpr uint32_t kCountAt = 24;
  static constexpr uint32_t kLengthAt = 28;
};

}  // namespace gradwire
