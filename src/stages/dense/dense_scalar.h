#pragma once

// The scalar kernels of dense steps. Contracts: stages/kernels.def.

#include <cstddef>
#include <cstdint>

#include "stages/dense/dense_bits.h"

namespace gradwire::scalar {

inline void write_dense(const uint8_t* symbols, const uint32_t* sizes, size_t n,
                        const PrefixCodes& codes, const PrefixLengths& lengths,
                        RiceWriter& writer) {
  write_dense_run(symbols, sizes, n, codes, lengths, writer);
}

inline bool read_dense(const DenseStrings& strings, const PrefixTable& table, size_t n, int width,
                       uint32_t* steps) {
  return read_dense_runs(strings, table, n, width, steps);
}

}  // namespace gradwire::scalar
