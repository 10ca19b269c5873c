#pragma once

// The scalar kernels of dense steps. Contracts: stages/kernels.def.

#include <cstddef>
#include <cstdint>

#include "stages/dense/dense_bits.h"

namespace gradwire::scalar {

inline void split_steps8(const uint8_t* from, const uint8_t* to, size_t n, ElementOrder order,
                         uint8_t* symbols, uint32_t* sizes) {
  split_each_step(from, to, n, order, symbols, sizes);
}
inline void split_steps16(const uint16_t* from, const uint16_t* to, size_t n, ElementOrder order,
                          uint8_t* symbols, uint32_t* sizes) {
  split_each_step(from, to, n, order, symbols, sizes);
}
inline void split_steps32(const uint32_t* from, const uint32_t* to, size_t n, ElementOrder order,
                          uint8_t* symbols, uint32_t* sizes) {
  split_each_step(from, to, n, order, symbols, sizes);
}

inline void write_symbols(const uint8_t* symbols, size_t n, const PrefixCodes& codes,
                          const PrefixLengths& lengths, RiceWriter& writer) {
  write_symbol_codes(symbols, n, codes, lengths, writer);
}

inline void write_sizes(const uint8_t* symbols, const uint32_t* sizes, size_t n,
                        RiceWriter& writer) {
  write_size_bits(symbols, sizes, n, writer);
}

inline bool read_symbols(const DenseStrings& strings, const SymbolTable& table, size_t n,
                         uint8_t* symbols) {
  return read_symbol_runs(strings, table, n, symbols);
}

inline bool read_sizes(SizeBits& sizes, const uint8_t* symbols, size_t n, uint32_t width,
                       uint32_t* steps) {
  sizes.take_all(symbols, n, steps);
  uint32_t beyond = 0;
  for (size_t i = 0; i < n; ++i) steps[i] = step_of(symbols[i], steps[i], width, beyond);
  return beyond == 0;
}

}  // namespace gradwire::scalar
