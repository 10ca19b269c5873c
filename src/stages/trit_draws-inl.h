// Drawn trits, and two bits for each, for one SIMD target. Contracts: stages/kernels.h.

#if defined(GRADWIRE_STAGES_TRIT_DRAWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_TRIT_DRAWS_INL_H_
#undef GRADWIRE_STAGES_TRIT_DRAWS_INL_H_
#else
#define GRADWIRE_STAGES_TRIT_DRAWS_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"

#include "stages/load-inl.h"
#include "stages/philox-inl.h"
#include "stages/trit_draws.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// At most 32 words at once, so that 64 values are a whole number of times as many.
using DrawTag = hn::CappedTag<uint64_t, 8>;

// Draws the trits of 64 values: a word of either sign.
HWY_INLINE void draw_64(const float* b, TritDraw draw, DrawStream stream, uint64_t first,
                        hn::Vec<DrawTag> places, uint64_t* plus, uint64_t* minus) {
  const DrawTag d64;
  const hn::RepartitionToNarrow<DrawTag> d32;
  const hn::Repartition<float, DrawTag> d;
  const hn::Repartition<int32_t, DrawTag> di32;
  const size_t lanes = hn::Lanes(d);
  const auto limit = hn::Set(d, draw.limit);
  const auto step = hn::Set(d, draw.step);
  const auto zero = hn::Zero(d);
  const auto compare = [&](size_t i, hn::Vec<DrawTag> words, auto& sent, auto& below) HWY_ATTR {
    const auto upper = hn::ShiftRight<8>(hn::BitCast(d32, words));
    const auto threshold = hn::Mul(hn::ConvertTo(d, hn::BitCast(di32, upper)), step);
    const auto value = hn::LoadU(d, b + i);
    sent = hn::Gt(hn::Min(hn::Abs(value), limit), threshold);
    below = hn::Lt(value, zero);
  };
  uint8_t sent_bits[8];
  uint8_t below_bits[8];
  hn::Vec<DrawTag> words0, words1;
  hn::Mask<decltype(d)> sent0, below0, sent1, below1;
  for (size_t i = 0; i < kWordBits; i += 2 * lanes) {
    philox_words(d64, stream, (first + i) / 4, places, words0, words1);
    compare(i, words0, sent0, below0);
    compare(i + lanes, words1, sent1, below1);
    if (lanes >= 8) {
      hn::StoreMaskBits(d, sent0, sent_bits + i / 8);
      hn::StoreMaskBits(d, sent1, sent_bits + (i + lanes) / 8);
      hn::StoreMaskBits(d, below0, below_bits + i / 8);
      hn::StoreMaskBits(d, below1, below_bits + (i + lanes) / 8);
    } else {
      sent_bits[i / 8] = static_cast<uint8_t>(bits_of_mask(d, sent0) | bits_of_mask(d, sent1) << 4);
      below_bits[i / 8] =
          static_cast<uint8_t>(bits_of_mask(d, below0) | bits_of_mask(d, below1) << 4);
    }
  }
  uint64_t sent = 0;
  uint64_t below = 0;
  std::memcpy(&sent, sent_bits, sizeof sent);
  std::memcpy(&below, below_bits, sizeof below);
  *plus = sent & ~below;
  *minus = sent & below;
}

void draw_trits(const float* b, size_t n, TritDraw draw, const DrawStream& draws, uint64_t first,
                uint64_t* plus, uint64_t* minus) {
  const DrawStream stream = draws;  // a copy, which stores of bytes can't change
  const auto places = philox_places(DrawTag());
  const size_t whole = n / kWordBits * kWordBits;
  for (size_t i = 0; i < whole; i += kWordBits) {
    draw_64(b + i, draw, stream, first + i, places, plus + i / kWordBits, minus + i / kWordBits);
  }
  if (whole == n) return;
  // A last, short word is done on a copy with zeros behind, whose trits are always 0.
  float last[kWordBits] = {};
  std::memcpy(last, b + whole, (n - whole) * sizeof *b);
  draw_64(last, draw, stream, first + whole, places, plus + whole / kWordBits,
          minus + whole / kWordBits);
}

// Calls put(d, i, values) for the values from i on, with `zero` where the trit is 0, and
// one(i, trit) for the last few.
template <typename Vectors, typename One>
HWY_INLINE bool unpack_two_bits_with(const uint8_t* packed, size_t n, float m, float zero,
                                     Vectors put, One one) {
  constexpr size_t kAtOnce = 16;
  const hn::CappedTag<float, kAtOnce> d;
  const hn::RebindToUnsigned<decltype(d)> d32;
  const size_t lanes = hn::Lanes(d);
  const auto zeros = hn::Set(d, zero);
  const auto positive = hn::Set(d, m);
  const auto negative = hn::Set(d, -m);
  const auto shifts = hn::ShiftLeft<1>(hn::Iota(d32, 0));
  const auto lower = hn::Set(d32, 1);
  const auto upper = hn::Set(d32, 2);
  uint32_t invalid = 0;
  size_t i = 0;
  for (; i + kAtOnce <= n; i += kAtOnce) {
    uint32_t codes = 0;
    std::memcpy(&codes, packed + i / kTwoBitTrits, sizeof codes);
    invalid |= codes & codes >> 1 & 0x55555555u;
    for (size_t at = 0; at < kAtOnce; at += lanes) {
      const auto code = hn::Shr(hn::Set(d32, codes >> 2 * at), shifts);
      const auto is_plus = hn::RebindMask(d, hn::TestBit(code, lower));
      const auto is_minus = hn::RebindMask(d, hn::TestBit(code, upper));
      put(d, i + at, hn::IfThenElse(is_plus, positive, hn::IfThenElse(is_minus, negative, zeros)));
    }
  }
  bool valid = invalid == 0;
  for (; i < kTwoBitTrits * two_bit_size(n); ++i) {
    const int code = packed[i / kTwoBitTrits] >> 2 * (i % kTwoBitTrits) & 3;
    valid &= code != 3 && (i < n || code == 0);
    if (i < n) one(i, two_bit_trit(code));
  }
  return valid;
}

bool unpack_two_bits(const uint8_t* packed, size_t n, float m, float* out) {
  return unpack_two_bits_with(
      packed, n, m, 0.0f,
      [=](auto d, size_t i, auto values) HWY_ATTR { hn::StoreU(values, d, out + i); },
      [=](size_t i, int trit) { out[i] = ternary_value(trit, m); });
}

bool unpack_two_bits_add(const uint8_t* packed, size_t n, float m, float* out) {
  // Adding -0 changes nothing, not even -0.
  return unpack_two_bits_with(
      packed, n, m, -0.0f,
      [=](auto d, size_t i, auto values)
          HWY_ATTR { hn::StoreU(hn::Add(hn::LoadU(d, out + i), values), d, out + i); },
      [=](size_t i, int trit) { out[i] = ternary_accumulate(out[i], trit, m); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
