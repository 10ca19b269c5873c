// Dense steps, for one SIMD target. Contracts: stages/kernels.def.
//
// Each code begins where the one before ends, so these are scalar instructions; the target's shifts
// and bit counts make them faster.

#include "hwy/highway.h"

#include "stages/dense/dense_bits.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

void write_dense(const uint8_t* symbols, const uint32_t* sizes, size_t n, const PrefixCodes& codes,
                 const PrefixLengths& lengths, RiceWriter& writer) {
  write_dense_run(symbols, sizes, n, codes, lengths, writer);
}

bool read_dense(const DenseStrings& strings, const PrefixTable& table, size_t n, int width,
                uint32_t* steps) {
  return read_dense_runs(strings, table, n, width, steps);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
