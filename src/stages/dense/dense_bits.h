#pragma once

// Writes and reads the steps of a dense chunk (spec/format.md, Delta): a prefix code says how many
// bits |step| has; its sign and the bits below the highest stand apart from the codes. Kernels of
// every target use these functions, so all of them are inlined and compiled for the target.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "hwy/base.h"

#include "base/endian.h"
#include "stages/dense/prefix_code.h"
#include "stages/rice/rice_bits.h"
#include "stages/steps/steps.h"

namespace gradwire {

// The symbols of a chunk are cut into this many runs, each with a string of codes of its own, so
// that a decoder reads several at once. The last runs may be shorter or empty.
inline constexpr size_t kDenseRuns = 4;
using DenseStrings = std::array<std::span<const uint8_t>, kDenseRuns>;

constexpr size_t dense_run(size_t n) { return (n + kDenseRuns - 1) / kDenseRuns; }

// A number's bits, without a count of zeros, so that the compiler makes vectors of it.
HWY_INLINE uint32_t bit_width_of(uint32_t number) {
  // Without the bit below the highest, no rounding reaches the next power of two.
  const auto rounded = static_cast<float>(static_cast<int32_t>(number & ~(number >> 1)));
  const auto exponent = static_cast<int32_t>(std::bit_cast<uint32_t>(rounded) >> 23 & 0xff);
  return static_cast<uint32_t>(std::max(exponent - 126, 0));
}

template <ElementOrder kOrder, typename Bits>
HWY_INLINE void split_steps_in(const Bits* from, const Bits* to, size_t n, uint8_t* symbols,
                               uint32_t* sizes) {
  for (size_t i = 0; i < n; ++i) {
    const Bits step = step_between(from[i], to[i], kOrder);
    const uint32_t size = step_size(step);
    const uint32_t width = bit_width_of(size);
    symbols[i] = static_cast<uint8_t>(width);
    // Two shifts, because 32 bits can't be shifted by 32.
    const uint32_t power = uint32_t{1} << width / 2 << (width - width / 2);
    sizes[i] = (size << 1 | is_negative_step(step)) & (power - 1);
  }
}

// Kernels::split_steps8 to split_steps32.
template <typename Bits>
HWY_INLINE void split_each_step(const Bits* from, const Bits* to, size_t n, ElementOrder order,
                                uint8_t* symbols, uint32_t* sizes) {
  if (order == ElementOrder::kFloat) {
    split_steps_in<ElementOrder::kFloat>(from, to, n, symbols, sizes);
  } else {
    split_steps_in<ElementOrder::kInteger>(from, to, n, symbols, sizes);
  }
}

// Kernels::write_symbols.
HWY_INLINE void write_symbol_codes(const uint8_t* symbols, size_t n, const PrefixCodes& codes,
                                   const PrefixLengths& lengths, RiceWriter& to) {
  RiceWriter writer = to;  // in registers, which no byte that is written may be a part of
  constexpr size_t kAtOnce = 5;
  static_assert(kAtOnce * kLongestPrefix <= kMostBetweenFlushes);
  const auto put = [&](size_t i) { writer.put(0, codes.of[symbols[i]], lengths.of[symbols[i]]); };
  size_t i = 0;
  for (; i + kAtOnce <= n; i += kAtOnce) {
    for (size_t j = 0; j < kAtOnce; ++j) put(i + j);
    writer.flush();
  }
  for (; i < n; ++i) put(i);
  writer.flush();
  to = writer;
}

// Kernels::write_sizes.
HWY_INLINE void write_size_bits(const uint8_t* symbols, const uint32_t* sizes, size_t n,
                                RiceWriter& to) {
  RiceWriter writer = to;
  const auto put = [&](size_t i) { writer.put(0, sizes[i], symbols[i]); };
  size_t i = 0;
  for (; i + 2 <= n; i += 2) {
    put(i);
    if (HWY_UNLIKELY(uint32_t{symbols[i]} + symbols[i + 1] > kMostBetweenFlushes)) writer.flush();
    put(i + 1);
    writer.flush();
  }
  if (i != n) {
    put(i);
    writer.flush();
  }
  to = writer;
}

// A run on its way from its string to symbols.
struct SymbolReader {
  RiceReader reader;
  uint8_t* at;
  uint8_t* end;

  // Reads some symbols, and needs eight bytes. false: no code begins so, or the end is near.
  HWY_INLINE bool advance(const SymbolTable& table) {
    reader.fill();
    for (int i = 0; i < kLookups; ++i) {
      const auto entry = table.of[reader.bits % SymbolTable::kSize];
      if (HWY_UNLIKELY(end - at < kWritten || entry.count() == 0)) return false;
      store_le(reinterpret_cast<std::byte*>(at), entry.bits);
      at += entry.count();
      reader.drop(static_cast<int>(entry.length()));
    }
    return true;
  }
  // Reads what is left; returns whether the string ends then.
  HWY_INLINE bool finish(const SymbolTable& table) {
    while (reader.has_word() && advance(table)) {
    }
    for (; at != end; ++at) {
      reader.fill_to_end();
      const size_t bits = reader.bits % SymbolTable::kSize;
      *at = static_cast<uint8_t>(table.of[bits].bits);
      reader.drop(table.first_lengths[bits]);
      if (table.first_lengths[bits] == 0 || reader.held < 0) return false;
    }
    reader.fill_to_end();
    return reader.ended() && reader.next == reader.end;
  }

 private:
  static constexpr int kLookups = 4;
  static constexpr ptrdiff_t kWritten = 4;  // bytes with each lookup
};

// Kernels::read_symbols.
HWY_INLINE bool read_symbol_runs(const DenseStrings& strings, const SymbolTable& table, size_t n,
                                 uint8_t* symbols) {
  static_assert(kDenseRuns == 4);
  const size_t run = dense_run(n);
  SymbolReader readers[kDenseRuns];
  for (size_t r = 0; r < kDenseRuns; ++r) {
    const std::span<const uint8_t> string = strings[r];
    readers[r] = {{string.data(), string.data() + string.size()},
                  symbols + std::min(r * run, n),
                  symbols + std::min((r + 1) * run, n)};
  }
  SymbolReader a = readers[0];
  SymbolReader b = readers[1];
  SymbolReader c = readers[2];
  SymbolReader d = readers[3];
  while (a.reader.has_word() && b.reader.has_word() && c.reader.has_word() && d.reader.has_word() &&
         a.advance(table) && b.advance(table) && c.advance(table) && d.advance(table)) {
  }
  return a.finish(table) && b.finish(table) && c.finish(table) && d.finish(table);
}

// The sizes of a chunk; `at` counts bits.
struct SizeBits {
  std::span<const uint8_t> bytes;
  uint64_t at = 0;

  // The bits from the next one on, of which 32 or more are right, or all up to the end. Moves on by
  // `length` bits, which must be there.
  HWY_INLINE uint32_t take(uint32_t length) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at / 8, std::min(bytes.size() - at / 8, sizeof word));
    word >>= at % 8;
    at += length;
    return static_cast<uint32_t>(word);
  }
  // The same for n lengths, of which none is above 32.
  HWY_INLINE void take_all(const uint8_t* lengths, size_t n, uint32_t* bits) {
    size_t i = 0;
    uint64_t from = at;
    const uint8_t* first = bytes.data();
    const uint64_t last = bytes.size() < sizeof(uint64_t) ? 0 : 8 * (bytes.size() - 7);
    for (; i < n && from < last; ++i) {
      uint64_t word;
      std::memcpy(&word, first + from / 8, sizeof word);
      bits[i] = static_cast<uint32_t>(word >> from % 8);
      from += lengths[i];
    }
    at = from;
    for (; i < n; ++i) bits[i] = take(lengths[i]);
  }
  // Whether the bytes hold so many bits and zeros up to a whole byte.
  [[nodiscard]] bool holds(uint64_t count) const {
    if (bytes.size() != (count + 7) / 8) return false;
    return count % 8 == 0 || bytes.back() >> count % 8 == 0;
  }
};

// The step of a symbol that these bits begin with: the sign, and the size below its highest bit.
// Sets `beyond` if no step of `width` bits is so long.
HWY_INLINE uint32_t step_of(uint32_t symbol, uint32_t bits, uint32_t width, uint32_t& beyond) {
  const auto mask = static_cast<uint32_t>((uint64_t{1} << symbol) - 1);
  bits &= mask;
  if (symbol == width) beyond |= bits >> 1;
  const uint32_t size = (mask - (mask >> 1)) | bits >> 1;
  const uint32_t negative = 0 - (bits & 1);
  return (size ^ negative) - negative;
}

}  // namespace gradwire
