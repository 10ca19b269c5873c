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
#include "stages/trit_draws.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// 64 values are a whole number of times two vectors.
using DrawTag = hn::CappedTag<float, 16>;
using DrawMask = hn::Mask<DrawTag>;

// The trits of one vector. Without kClips no value may be limited.
template <bool kClips>
HWY_INLINE void draw_vector(const float* b, const uint32_t* words, TritDraw draw, DrawMask& plus,
                            DrawMask& minus) {
  const DrawTag d;
  const hn::RebindToUnsigned<DrawTag> d32;
  const hn::RebindToSigned<DrawTag> di32;
  const auto upper = hn::BitCast(di32, hn::ShiftRight<8>(hn::LoadU(d32, words)));
  const auto threshold = hn::Mul(hn::ConvertTo(d, upper), hn::Set(d, draw.step));
  auto value = hn::LoadU(d, b);
  auto opposite = hn::Neg(value);
  if constexpr (kClips) {
    value = hn::Min(value, hn::Set(d, draw.limit));
    opposite = hn::Min(opposite, hn::Set(d, draw.limit));
  }
  plus = hn::Gt(value, threshold);
  minus = hn::Gt(opposite, threshold);
}

// The bits of two vectors, one behind the other.
HWY_INLINE void store_masks(DrawMask mask0, DrawMask mask1, uint8_t* bits) {
  const DrawTag d;
  if (hn::Lanes(d) >= 8) {
    hn::StoreMaskBits(d, mask0, bits);
    hn::StoreMaskBits(d, mask1, bits + hn::Lanes(d) / 8);
  } else {
    *bits = static_cast<uint8_t>(bits_of_mask(d, mask0) | bits_of_mask(d, mask1) << 4);
  }
}

// The trits of 64 values, 8 bytes of either sign.
template <bool kClips>
HWY_INLINE void draw_64(const float* b, const uint32_t* words, TritDraw draw, uint8_t* plus,
                        uint8_t* minus) {
  const size_t lanes = hn::Lanes(DrawTag());
  DrawMask plus0, plus1, minus0, minus1;
  HWY_UNROLL(8)
  for (size_t i = 0; i < kWordBits; i += 2 * lanes) {
    draw_vector<kClips>(b + i, words + i, draw, plus0, minus0);
    draw_vector<kClips>(b + i + lanes, words + i + lanes, draw, plus1, minus1);
    store_masks(plus0, plus1, plus + i / 8);
    store_masks(minus0, minus1, minus + i / 8);
  }
}

template <bool kClips>
HWY_INLINE void draw_trits_with(const float* b, size_t n, TritDraw draw, const uint32_t* words,
                                uint8_t* plus, uint8_t* minus) {
  size_t i = 0;
  for (; i + kWordBits <= n; i += kWordBits) {
    draw_64<kClips>(b + i, words + i, draw, plus + i / 8, minus + i / 8);
  }
  if (i == n) return;
  // A last, short word is done on a copy with zeros behind, whose trits are always 0.
  float last_b[kWordBits] = {};
  uint32_t last_words[kWordBits] = {};
  std::memcpy(last_b, b + i, (n - i) * sizeof *b);
  std::memcpy(last_words, words + i, (n - i) * sizeof *words);
  draw_64<kClips>(last_b, last_words, draw, plus + i / 8, minus + i / 8);
}

void draw_trits(const float* b, size_t n, TritDraw draw, const uint32_t* words, uint64_t* plus,
                uint64_t* minus) {
  auto* plus_bytes = reinterpret_cast<uint8_t*>(plus);
  auto* minus_bytes = reinterpret_cast<uint8_t*>(minus);
  if (draw.clips()) {
    draw_trits_with<true>(b, n, draw, words, plus_bytes, minus_bytes);
  } else {
    draw_trits_with<false>(b, n, draw, words, plus_bytes, minus_bytes);
  }
}

// spread_bits of each nibble, to a byte.
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
