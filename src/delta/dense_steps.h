#pragma once

// A dense chunk: the step of every element. A prefix code says how many bits |step| has; then
// follow the sign and the bits below the highest.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "delta/prefix_code.h"
#include "stages/rice/rice_bits.h"
#include "stages/steps/steps.h"

namespace gradwire {

template <typename Bits>
inline constexpr size_t kSymbolsOf = 8 * sizeof(Bits) + 1;
// The lengths of the codes, four bits each, the first the lowest.
template <typename Bits>
inline constexpr size_t kLengthsSize = (kSymbolsOf<Bits> + 1) / 2;

// How many steps of a chunk have each number of bits.
template <typename Bits>
struct StepCounts {
  uint32_t of[kSymbolsOf<Bits>] = {};

  StepCounts(const Bits* from, const Bits* to, uint64_t n, ElementOrder order) {
    // Neighbours mostly have the same number of bits; they count in different places.
    uint32_t parts[4][kSymbolsOf<Bits>] = {};
    for (uint64_t i = 0; i < n; ++i) {
      const Bits step = step_between(from[i], to[i], order);
      ++parts[i % 4][std::bit_width(step_size(step))];
    }
    for (const auto& part : parts) {
      for (size_t symbol = 0; symbol < kSymbolsOf<Bits>; ++symbol) of[symbol] += part[symbol];
    }
  }
};

template <typename Bits>
class DenseCode {
 public:
  explicit DenseCode(const StepCounts<Bits>& counts)
      : lengths_(PrefixLengths::create(counts.of)), codes_(lengths_) {
    uint64_t bits = 0;
    for (size_t symbol = 0; symbol < kSymbolsOf<Bits>; ++symbol) {
      bits += uint64_t{counts.of[symbol]} * (lengths_.of[symbol] + symbol);
    }
    size_ = kLengthsSize<Bits> + (bits + 7) / 8;
  }

  [[nodiscard]] uint64_t size() const { return size_; }

  // Writes size() bytes, and up to 8 after them.
  void write(const Bits* from, const Bits* to, uint64_t n, ElementOrder order, uint8_t* out) const {
    for (size_t i = 0; i < kLengthsSize<Bits>; ++i) {
      const uint8_t high = 2 * i + 1 < kSymbolsOf<Bits> ? lengths_.of[2 * i + 1] : 0;
      *out++ = static_cast<uint8_t>(lengths_.of[2 * i] | high << 4);
    }
    RiceWriter writer{out};
    for (uint64_t i = 0; i < n; ++i) {
      const Bits step = step_between(from[i], to[i], order);
      const uint64_t size = step_size(step);
      const auto symbol = static_cast<uint32_t>(std::bit_width(size));
      const uint32_t length = lengths_.of[symbol];
      // The highest bit of the size gives way to nothing, the sign stands before the rest.
      const uint64_t rest = (size ^ (uint64_t{1} << symbol >> 1)) << 1 | is_negative_step(step);
      writer.put(0, codes_.of[symbol] | rest << length, length + symbol);
      writer.flush();
    }
  }

 private:
  PrefixLengths lengths_;
  PrefixCodes codes_;
  uint64_t size_ = 0;
};

// Applies the steps to n values. false: the bytes are not valid.
template <typename Bits>
bool apply_dense(std::span<const uint8_t> bytes, Bits* values, uint64_t n, ElementOrder order) {
  if (bytes.size() < kLengthsSize<Bits>) return false;
  PrefixLengths lengths;
  for (size_t symbol = 0; symbol < 2 * kLengthsSize<Bits>; ++symbol) {
    const auto length = static_cast<uint8_t>(bytes[symbol / 2] >> symbol % 2 * 4 & 15);
    if (symbol < kSymbolsOf<Bits>) {
      lengths.of[symbol] = length;
    } else if (length != 0) {
      return false;
    }
  }
  if (!lengths.valid()) return false;
  const PrefixTable table(lengths);
  RiceReader reader{bytes.data() + kLengthsSize<Bits>, bytes.data() + bytes.size()};
  for (uint64_t i = 0; i < n; ++i) {
    if (reader.has_word()) {
      reader.fill();
    } else {
      reader.fill_to_end();
    }
    const auto [symbol, length] = table.of[reader.bits % std::size(table.of)];
    const uint64_t rest = reader.bits >> length;
    reader.drop(length + symbol);
    if (length == 0 || reader.held < 0) return false;
    if (symbol == 0) continue;
    const uint64_t size =
        uint64_t{1} << (symbol - 1) | (rest >> 1 & ((uint64_t{1} << (symbol - 1)) - 1));
    if (symbol == 8 * sizeof(Bits) && size != kSignBit<Bits>) return false;  // no step is so long
    const auto step = static_cast<Bits>((rest & 1) != 0 ? uint64_t{0} - size : size);
    values[i] = step_from(values[i], step, order);
  }
  reader.fill_to_end();
  return reader.ended() && reader.next == reader.end;
}

}  // namespace gradwire
