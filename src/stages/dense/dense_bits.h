#pragma once

// Writes and reads the steps of a dense chunk (spec/format.md, Delta): a prefix code says how many
// bits |step| has, then follow its sign and the bits below the highest. Kernels of every target use
// these functions, so all of them are inlined and compiled for the target.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "hwy/base.h"

#include "stages/dense/prefix_code.h"
#include "stages/rice/rice_bits.h"

namespace gradwire {

// The steps of a chunk are cut into this many runs, each with a string of bits of its own, so that
// a decoder reads several at once. The last runs may be shorter or empty.
inline constexpr size_t kDenseRuns = 4;
using DenseStrings = std::array<std::span<const uint8_t>, kDenseRuns>;

constexpr size_t dense_run(size_t n) { return (n + kDenseRuns - 1) / kDenseRuns; }

// Kernels::write_dense.
HWY_INLINE void write_dense_run(const uint8_t* symbols, const uint32_t* sizes, size_t n,
                                const PrefixCodes& codes, const PrefixLengths& lengths,
                                RiceWriter& writer) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t symbol = symbols[i];
    const uint32_t length = lengths.of[symbol];
    const uint64_t rest = sizes[i] & ((uint64_t{1} << symbol) - 1);
    writer.put(0, codes.of[symbol] | rest << length, length + symbol);
    writer.flush();
  }
}

// Reads a step; `fits` becomes 0 if no code begins so or no step is so long.
HWY_INLINE uint32_t take_step(RiceReader& reader, const PrefixTable& table, int width,
                              uint32_t& fits) {
  const auto [symbol, length] = table.of[reader.bits % (size_t{1} << kLongestPrefix)];
  // The sign, and the bits of the size below the highest.
  const uint64_t rest = reader.bits >> length & ((uint64_t{1} << symbol) - 1);
  reader.drop(length + symbol);
  const auto size = static_cast<uint32_t>(uint64_t{1} << symbol >> 1 | rest >> 1);
  fits &= static_cast<uint32_t>(length != 0) & static_cast<uint32_t>(symbol < width || rest < 2);
  // Without a branch, which would guess the sign.
  const auto negative = static_cast<uint32_t>(0 - (rest & 1));
  return (size ^ negative) - negative;
}

// Kernels::read_dense.
HWY_INLINE bool read_dense_runs(const DenseStrings& strings, const PrefixTable& table, size_t n,
                                int width, uint32_t* steps) {
  static_assert(kDenseRuns == 4);
  const size_t run = dense_run(n);
  const auto begin_of = [&](size_t r) { return r * run < n ? r * run : n; };
  RiceReader readers[kDenseRuns];
  for (size_t r = 0; r < kDenseRuns; ++r) {
    readers[r] = {strings[r].data(), strings[r].data() + strings[r].size()};
  }
  RiceReader a = readers[0];
  RiceReader b = readers[1];
  RiceReader c = readers[2];
  RiceReader d = readers[3];
  uint32_t fits = 1;
  size_t i = 0;
  const size_t shortest = n - begin_of(kDenseRuns - 1);
  for (; i < shortest && a.has_word() && b.has_word() && c.has_word() && d.has_word(); ++i) {
    a.fill();
    b.fill();
    c.fill();
    d.fill();
    steps[i] = take_step(a, table, width, fits);
    steps[i + run] = take_step(b, table, width, fits);
    steps[i + 2 * run] = take_step(c, table, width, fits);
    steps[i + 3 * run] = take_step(d, table, width, fits);
  }
  if (fits == 0) return false;
  const RiceReader left[kDenseRuns] = {a, b, c, d};
  for (size_t r = 0; r < kDenseRuns; ++r) {
    RiceReader reader = left[r];
    for (size_t at = begin_of(r) + i; at < begin_of(r + 1); ++at) {
      if (reader.has_word()) {
        reader.fill();
      } else {
        reader.fill_to_end();
      }
      steps[at] = take_step(reader, table, width, fits);
      if (fits == 0 || reader.held < 0) return false;
    }
    reader.fill_to_end();
    if (!reader.ended() || reader.next != reader.end) return false;
  }
  return true;
}

}  // namespace gradwire
