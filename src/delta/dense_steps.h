#pragma once

// A dense chunk: the step of every element (stages/dense/dense_bits.h).

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>

#include "base/varint.h"
#include "stages/dense/prefix_code.h"
#include "stages/kernels.h"
#include "stages/steps/steps.h"

namespace gradwire {

template <typename Bits>
inline constexpr size_t kSymbolsOf = 8 * sizeof(Bits) + 1;
// The lengths of the codes, four bits each, the first the lowest.
template <typename Bits>
inline constexpr size_t kLengthsSize = (kSymbolsOf<Bits> + 1) / 2;

inline constexpr size_t kMostDense = 65536;  // elements of a chunk

// Some steps as the kernels take them.
struct DensePieces {
  static constexpr size_t kMost = 256;

  uint8_t symbols[kMost];
  uint32_t sizes[kMost];

  void take(const Kernels& kernels, const uint8_t* from, const uint8_t* to, size_t n,
            ElementOrder order) {
    kernels.split_steps8(from, to, n, order, symbols, sizes);
  }
  void take(const Kernels& kernels, const uint16_t* from, const uint16_t* to, size_t n,
            ElementOrder order) {
    kernels.split_steps16(from, to, n, order, symbols, sizes);
  }
  void take(const Kernels& kernels, const uint32_t* from, const uint32_t* to, size_t n,
            ElementOrder order) {
    kernels.split_steps32(from, to, n, order, symbols, sizes);
  }
};

template <typename Bits>
class DenseCode {
 public:
  DenseCode(const Kernels& kernels, const Bits* from, const Bits* to, uint64_t n,
            ElementOrder order)
      : kernels_(kernels),
        from_(from),
        to_(to),
        n_(n),
        order_(order),
        counts_(*this),
        codes_(counts_.lengths) {
    uint64_t size_bits = 0;
    size_ = kLengthsSize<Bits>;
    for (size_t run = 0; run < kDenseRuns; ++run) {
      uint64_t bits = 0;
      for (size_t symbol = 0; symbol < kSymbolsOf<Bits>; ++symbol) {
        const uint64_t count = counts_.of[run][symbol];
        bits += count * counts_.lengths.of[symbol];
        size_bits += count * symbol;
      }
      strings_[run] = static_cast<uint32_t>((bits + 7) / 8);
      size_ += strings_[run] + varint_size(strings_[run]);
    }
    size_ += (size_bits + 7) / 8;
  }

  [[nodiscard]] uint64_t size() const { return size_; }

  // Writes size() bytes, and up to 8 after them.
  void write(uint8_t* out) const {
    const PrefixLengths& lengths = counts_.lengths;
    for (size_t i = 0; i < kLengthsSize<Bits>; ++i) {
      const uint8_t high = 2 * i + 1 < kSymbolsOf<Bits> ? lengths.of[2 * i + 1] : 0;
      *out++ = static_cast<uint8_t>(lengths.of[2 * i] | high << 4);
    }
    for (const uint32_t size : strings_) out = write_varint(size, out);
    const size_t most = dense_run(n_);
    for (size_t run = 0; run < kDenseRuns; ++run) {
      RiceWriter writer{out};
      const size_t first = std::min<size_t>(run * most, n_);
      const size_t n = std::min<size_t>(first + most, n_) - first;
      kernels_.write_symbols(symbols_ + first, n, codes_, lengths, writer);
      out += strings_[run];
    }
    RiceWriter writer{out};
    for (size_t run = 0; run < kDenseRuns; ++run) {
      for_each_piece(run, [&](const DensePieces& pieces, size_t, size_t n) {
        kernels_.write_sizes(pieces.symbols, pieces.sizes, n, writer);
      });
    }
  }

 private:
  // How many steps of each run have each number of bits.
  struct Counts {
    uint32_t of[kDenseRuns][kSymbolsOf<Bits>] = {};
    PrefixLengths lengths;

    explicit Counts(DenseCode& code) {
      uint32_t all[kSymbolsOf<Bits>] = {};
      for (size_t run = 0; run < kDenseRuns; ++run) {
        // Neighbours mostly have the same number of bits; they count in different places.
        uint32_t parts[4][kSymbolsOf<Bits>] = {};
        code.for_each_piece(run, [&](const DensePieces& pieces, size_t at, size_t n) {
          std::copy_n(pieces.symbols, n, code.symbols_ + at);
          size_t i = 0;
          for (; i + 4 <= n; i += 4) {
            for (size_t j = 0; j < 4; ++j) ++parts[j][pieces.symbols[i + j]];
          }
          for (; i < n; ++i) ++parts[0][pieces.symbols[i]];
        });
        for (size_t symbol = 0; symbol < kSymbolsOf<Bits>; ++symbol) {
          for (const auto& part : parts) of[run][symbol] += part[symbol];
          all[symbol] += of[run][symbol];
        }
      }
      lengths = PrefixLengths::create(all);
    }
  };

  template <typename Take>
  void for_each_piece(size_t run, const Take& take) const {
    DensePieces pieces;
    const size_t most = dense_run(n_);
    const size_t end = std::min<size_t>((run + 1) * most, n_);
    for (size_t at = std::min<size_t>(run * most, n_); at < end; at += DensePieces::kMost) {
      const size_t n = std::min(end - at, DensePieces::kMost);
      pieces.take(kernels_, from_ + at, to_ + at, n, order_);
      take(pieces, at, n);
    }
  }

  const Kernels& kernels_;
  const Bits* from_;
  const Bits* to_;
  uint64_t n_;
  ElementOrder order_;
  uint8_t symbols_[kMostDense];
  Counts counts_;
  PrefixCodes codes_;
  uint32_t strings_[kDenseRuns] = {};  // bytes
  uint64_t size_ = 0;
};

// Fetches some bytes a page ahead, where the hardware's prefetch stops. A few lines between the
// pieces do not wait for each other.
inline void fetch_ahead(const void* at, size_t bytes) {
  constexpr size_t kPage = 4096;
  constexpr size_t kLine = 64;
  const uintptr_t first = reinterpret_cast<uintptr_t>(at) + kPage;
  for (size_t i = 0; i < bytes; i += kLine) {
    // Beyond the array a number may point, and a pointer may not.
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    __builtin_prefetch(reinterpret_cast<const void*>(first + i));
  }
}

// Applies the steps to n values. false: the bytes are not valid.
template <typename Bits>
bool apply_dense(const Kernels& kernels, std::span<const uint8_t> bytes, Bits* values, uint64_t n,
                 ElementOrder order) {
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
  const uint8_t* at = bytes.data() + kLengthsSize<Bits>;
  const uint8_t* end = bytes.data() + bytes.size();
  size_t sizes[kDenseRuns];  // of the strings of codes
  for (size_t& size : sizes) {
    const auto read = read_varint(at, end);
    if (!read) return false;
    size = *read;
  }
  DenseStrings strings;
  for (size_t run = 0; run < kDenseRuns; ++run) {
    if (sizes[run] > static_cast<size_t>(end - at)) return false;
    strings[run] = {at, sizes[run]};
    at += sizes[run];
  }
  uint8_t symbols[kMostDense];
  if (!kernels.read_symbols(strings, SymbolTable(lengths), n, symbols)) return false;
  SizeBits sizes_of_steps{{at, end}};
  if (!sizes_of_steps.holds(std::accumulate(symbols, symbols + n, uint64_t{0}))) return false;
  for (uint64_t first = 0; first < n; first += DensePieces::kMost) {
    uint32_t steps[DensePieces::kMost];
    const size_t count = std::min<uint64_t>(n - first, DensePieces::kMost);
    fetch_ahead(values + first, DensePieces::kMost * sizeof(Bits));
    fetch_ahead(sizes_of_steps.bytes.data() + sizes_of_steps.at / 8,
                DensePieces::kMost * sizeof(Bits));
    if (!kernels.read_sizes(sizes_of_steps, symbols + first, count, 8 * sizeof(Bits), steps)) {
      return false;
    }
    if constexpr (sizeof(Bits) == 1) {
      kernels.move_by_steps8(values + first, count, order, steps);
    } else if constexpr (sizeof(Bits) == 2) {
      kernels.move_by_steps16(values + first, count, order, steps);
    } else {
      kernels.move_by_steps32(values + first, count, order, steps);
    }
  }
  return true;
}

}  // namespace gradwire
