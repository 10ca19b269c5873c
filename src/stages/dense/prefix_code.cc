#include "stages/dense/prefix_code.h"

#include <algorithm>
#include <array>
#include <cassert>

namespace gradwire {
namespace {

// A tree's node: a symbol, or the sum of two nodes.
struct Node {
  uint64_t count;
  int parent;
};

// Huffman's lengths. The queue of symbols is sorted by count, that of sums grows in that order; of
// equal counts the symbol is taken first, so the lengths are the same on every machine.
PrefixLengths huffman(std::span<const uint32_t> counts) {
  std::array<uint8_t, kMostSymbols> symbols{};
  size_t used = 0;
  for (size_t symbol = 0; symbol < counts.size(); ++symbol) {
    if (counts[symbol] != 0) symbols[used++] = static_cast<uint8_t>(symbol);
  }
  assert(used > 0);
  std::stable_sort(symbols.begin(), symbols.begin() + used,
                   [&](uint8_t a, uint8_t b) { return counts[a] < counts[b]; });
  PrefixLengths lengths;
  if (used == 1) {
    lengths.of[symbols[0]] = 1;
    return lengths;
  }
  std::array<Node, 2 * kMostSymbols> nodes{};
  for (size_t i = 0; i < used; ++i) nodes[i] = {counts[symbols[i]], 0};
  size_t leaf = 0;
  size_t sum = used;
  for (size_t end = used; end < 2 * used - 1; ++end) {
    uint64_t count = 0;
    for (int child = 0; child < 2; ++child) {
      const bool takes_leaf = leaf < used && (sum == end || nodes[leaf].count <= nodes[sum].count);
      Node& node = nodes[takes_leaf ? leaf++ : sum++];
      node.parent = static_cast<int>(end);
      count += node.count;
    }
    nodes[end] = {count, 0};
  }
  std::array<uint8_t, 2 * kMostSymbols> depth{};
  for (size_t i = 2 * used - 2; i-- > 0;) {
    depth[i] = static_cast<uint8_t>(depth[static_cast<size_t>(nodes[i].parent)] + 1);
  }
  for (size_t i = 0; i < used; ++i) lengths.of[symbols[i]] = depth[i];
  return lengths;
}

uint32_t reversed(uint32_t code, int length) {
  uint32_t bits = 0;
  for (int i = 0; i < length; ++i) bits |= (code >> i & 1) << (length - 1 - i);
  return bits;
}

}  // namespace

PrefixLengths PrefixLengths::create(std::span<const uint32_t> counts) {
  std::array<uint32_t, kMostSymbols> halved{};
  std::ranges::copy(counts, halved.begin());
  for (;;) {
    const PrefixLengths lengths = huffman(std::span(halved).first(counts.size()));
    if (std::ranges::max(lengths.of) <= kLongestPrefix) return lengths;
    for (uint32_t& count : halved) count = (count + 1) / 2;  // closer to each other, none lost
  }
}

bool PrefixLengths::valid() const {
  constexpr uint32_t kWhole = 1u << kLongestPrefix;
  uint32_t taken = 0;
  int used = 0;
  for (const uint8_t length : of) {
    if (length > kLongestPrefix) return false;
    if (length == 0) continue;
    taken += kWhole >> length;
    ++used;
  }
  return used == 1 ? taken == kWhole / 2 : taken == kWhole;
}

PrefixCodes::PrefixCodes(const PrefixLengths& lengths) {
  uint32_t next = 0;
  for (int length = 1; length <= kLongestPrefix; ++length) {
    next <<= 1;
    for (size_t symbol = 0; symbol < kMostSymbols; ++symbol) {
      if (lengths.of[symbol] != length) continue;
      of[symbol] = static_cast<uint16_t>(reversed(next++, length));
    }
  }
}

SymbolTable::SymbolTable(const PrefixLengths& lengths) {
  const PrefixCodes codes(lengths);
  uint8_t first[kSize] = {};
  for (size_t symbol = 0; symbol < kMostSymbols; ++symbol) {
    const uint8_t length = lengths.of[symbol];
    if (length == 0) continue;
    for (size_t bits = codes.of[symbol]; bits < kSize; bits += size_t{1} << length) {
      first[bits] = static_cast<uint8_t>(symbol);
      first_lengths[bits] = length;
    }
  }
  for (size_t bits = 0; bits < kSize; ++bits) {
    // Without a branch, which would guess how many codes there are.
    uint32_t symbols = 0;
    uint32_t taken = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < kMost; ++i) {
      const size_t rest = bits >> taken;
      const uint32_t length = first_lengths[rest];
      const bool fits = length != 0 && taken + length <= kLongestPrefix;
      symbols |= uint32_t{first[rest]} << 8 * i;
      taken += fits ? length : 0;
      count += fits ? 1 : 0;
    }
    of[bits] = {symbols | count << kCountAt | taken << kLengthAt};
  }
}

}  // namespace gradwire
