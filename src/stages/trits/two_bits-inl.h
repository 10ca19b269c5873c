// Two bits a trit, for one SIMD target. Contracts: stages/kernels.def.

#include <cstring>

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/output-inl.h"
#include "stages/trits/trit.h"
#include "stages/trits/trit_bits.h"
#include "stages/trits/trits_scalar.h"
#include "stages/trits/two_bits.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// spread_bits of each nibble, as a byte.
alignas(16) constexpr uint8_t kSpreadNibbles[16] = {0x00, 0x01, 0x04, 0x05, 0x10, 0x11, 0x14, 0x15,
                                                    0x40, 0x41, 0x44, 0x45, 0x50, 0x51, 0x54, 0x55};

void pack_two_bits(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* packed) {
  const hn::FixedTag<uint8_t, 16> d8;
  constexpr size_t kWords = 2;  // of a vector
  const auto spread_plus = hn::Load(d8, kSpreadNibbles);
  const auto spread_minus = hn::Add(spread_plus, spread_plus);
  const auto nibble = hn::Set(d8, 0x0f);
  const auto codes = [&](auto a, auto b) HWY_ATTR {
    return hn::Or(hn::TableLookupBytes(spread_plus, a), hn::TableLookupBytes(spread_minus, b));
  };
  size_t i = 0;
  for (; i + kWords * kWordBits <= n; i += kWords * kWordBits) {
    const auto a = hn::LoadU(d8, reinterpret_cast<const uint8_t*>(plus + i / kWordBits));
    const auto b = hn::LoadU(d8, reinterpret_cast<const uint8_t*>(minus + i / kWordBits));
    const auto even = codes(hn::And(a, nibble), hn::And(b, nibble));
    const auto odd = codes(hn::ShiftRight<4>(a), hn::ShiftRight<4>(b));
    hn::StoreU(hn::InterleaveLower(d8, even, odd), d8, packed + i / kTwoBitTrits);
    hn::StoreU(hn::InterleaveUpper(d8, even, odd), d8, packed + i / kTwoBitTrits + 16);
  }
  pack_two_bit_words(plus + i / kWordBits, minus + i / kWordBits, n - i, packed + i / kTwoBitTrits);
}

bool unpack_two_bits(const uint8_t* packed, size_t n, float m, float* out, DecodeMode mode) {
  constexpr size_t kAtOnce = 16;
  const size_t whole = n / kAtOnce * kAtOnce;
  const uint32_t invalid = with_output(out, mode, [=](auto to) HWY_ATTR {
    const hn::CappedTag<float, kAtOnce> d;
    const hn::RebindToUnsigned<decltype(d)> d32;
    // Adding -0 changes nothing, not even -0.
    const auto zeros = hn::Set(d, mode == DecodeMode::kAdd ? -0.0f : 0.0f);
    const auto positive = hn::Set(d, m);
    const auto negative = hn::Set(d, -m);
    const auto shifts = hn::ShiftLeft<1>(hn::Iota(d32, 0));
    const auto lower = hn::Set(d32, 1);
    const auto upper = hn::Set(d32, 2);
    uint32_t threes = 0;
    for (size_t i = 0; i < whole; i += kAtOnce) {
      uint32_t codes = 0;
      std::memcpy(&codes, packed + i / kTwoBitTrits, sizeof codes);
      threes |= codes & codes >> 1 & 0x55555555u;
      for (size_t at = 0; at < kAtOnce; at += hn::Lanes(d)) {
        const auto code = hn::Shr(hn::Set(d32, codes >> 2 * at), shifts);
        const auto is_plus = hn::RebindMask(d, hn::TestBit(code, lower));
        const auto is_minus = hn::RebindMask(d, hn::TestBit(code, upper));
        to.put(d, hn::IfThenElse(is_plus, positive, hn::IfThenElse(is_minus, negative, zeros)),
               i + at);
      }
    }
    return threes;
  });
  return scalar::unpack_two_bits(packed + whole / kTwoBitTrits, n - whole, m, out + whole, mode) &&
         invalid == 0;
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
