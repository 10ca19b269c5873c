// Drawn trits, for one SIMD target. Contracts: stages/kernels.def.

#include <cstring>

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/ternary/trit_draws.h"
#include "stages/trits/trit_bits.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// 64 is a multiple of the lanes of two vectors.
using DrawTag = hn::CappedTag<float, 16>;
using DrawMask = hn::Mask<DrawTag>;

// The trits of one vector. kClips: values may be above the limit.
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

// The bits of two vectors, the first vector first.
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
  // The values of a short last word are copied and padded with zeros, whose trits are always 0.
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

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
