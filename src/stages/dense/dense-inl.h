// Dense steps, for one SIMD target. Contracts: stages/kernels.def.
//
// Each code begins where the one before ends, so strings are read and written in scalar
// instructions; the target's shifts and bit counts make them faster. Vectors make steps of the
// bits.

#include "hwy/highway.h"

#include "stages/dense/dense_bits.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

void split_steps8(const uint8_t* from, const uint8_t* to, size_t n, ElementOrder order,
                  uint8_t* symbols, uint32_t* sizes) {
  split_each_step(from, to, n, order, symbols, sizes);
}
void split_steps16(const uint16_t* from, const uint16_t* to, size_t n, ElementOrder order,
                   uint8_t* symbols, uint32_t* sizes) {
  split_each_step(from, to, n, order, symbols, sizes);
}
void split_steps32(const uint32_t* from, const uint32_t* to, size_t n, ElementOrder order,
                   uint8_t* symbols, uint32_t* sizes) {
  split_each_step(from, to, n, order, symbols, sizes);
}

void write_symbols(const uint8_t* symbols, size_t n, const PrefixCodes& codes,
                   const PrefixLengths& lengths, RiceWriter& writer) {
  write_symbol_codes(symbols, n, codes, lengths, writer);
}

void write_sizes(const uint8_t* symbols, const uint32_t* sizes, size_t n, RiceWriter& writer) {
  write_size_bits(symbols, sizes, n, writer);
}

bool read_symbols(const DenseStrings& strings, const SymbolTable& table, size_t n,
                  uint8_t* symbols) {
  return read_symbol_runs(strings, table, n, symbols);
}

bool read_sizes(SizeBits& sizes, const uint8_t* symbols, size_t n, uint32_t width,
                uint32_t* steps) {
  sizes.take_all(symbols, n, steps);
  const hn::CappedTag<uint32_t, 16> d;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto one = hn::Set(d, 1);
  const auto longest = hn::Set(d, width);
  auto beyond = hn::Zero(d);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) {
    // As step_of does. Two shifts, because a lane can't be shifted by 32.
    const auto symbol = hn::PromoteTo(d, hn::LoadU(d8, symbols + i));
    const auto half = hn::ShiftRight<1>(symbol);
    const auto power = hn::Shl(hn::Shl(one, half), hn::Sub(symbol, half));
    const auto mask = hn::Sub(power, one);
    const auto bits = hn::And(hn::LoadU(d, steps + i), mask);
    const auto low = hn::ShiftRight<1>(bits);
    beyond = hn::Or(beyond, hn::IfThenElseZero(hn::Eq(symbol, longest), low));
    const auto size = hn::Or(hn::Sub(mask, hn::ShiftRight<1>(mask)), low);
    const auto negative = hn::Sub(hn::Zero(d), hn::And(bits, one));
    hn::StoreU(hn::Sub(hn::Xor(size, negative), negative), d, steps + i);
  }
  uint32_t last_beyond = 0;
  for (; i < n; ++i) steps[i] = step_of(symbols[i], steps[i], width, last_beyond);
  return last_beyond == 0 && hn::AllTrue(d, hn::Eq(beyond, hn::Zero(d)));
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
