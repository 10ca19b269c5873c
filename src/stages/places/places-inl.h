// Places, for one SIMD target. Contracts: stages/kernels.def.
//
// Vectors list the places, find the best k, and make codes. Strings are written and read in scalar
// instructions; the target's shifts and bit counts make them faster.

#include <algorithm>
#include <bit>

#include "hwy/highway.h"

#include "stages/places/far_sizes_bits.h"
#include "stages/places/places.h"
#include "stages/places/places_bits.h"
#include "stages/places/places_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// The gaps before places[1], places[2], ...
template <class D16>
HWY_INLINE hn::Vec<D16> gaps_before(D16 d16, const uint16_t* places) {
  const auto step = hn::Sub(hn::LoadU(d16, places + 1), hn::LoadU(d16, places));
  return hn::Sub(step, hn::Set(d16, 1));
}

// The best k of write_places. A lane of 16 bits holds the sum of up to 2048 codes without k.
HWY_INLINE int best_gap_k(const uint16_t* places, size_t count, GapChoices choices) {
  static_assert((kMostPlaces / kPlaceRuns + 1) / 8 * kLongestGapCode < 65536);
  const hn::CappedTag<uint16_t, 32> d16;
  const auto escape = hn::Set(d16, kRiceEscape);
  int best = 0;
  uint64_t fewest = UINT64_MAX;
  for (int k = choices.first; k <= choices.last; ++k) {
    const auto escaped_more =
        hn::Set(d16, static_cast<uint16_t>(kLongestGapCode - kRiceEscape - 1 - k));
    auto sum = hn::Zero(d16);
    // The gaps after the last are 0.
    for (size_t i = 0; i < count; i += hn::Lanes(d16)) {
      const auto quotient = hn::Min(hn::ShiftRightSame(gaps_before(d16, places + i), k), escape);
      const auto more = hn::IfThenElseZero(hn::Eq(quotient, escape), escaped_more);
      sum = hn::Add(sum, hn::Add(quotient, more));
    }
    uint16_t lanes[hn::MaxLanes(d16)];
    hn::StoreU(sum, d16, lanes);
    uint64_t bits = static_cast<uint64_t>(k + 1) * count;
    for (size_t i = 0; i < hn::Lanes(d16); ++i) bits += lanes[i];
    if (bits < fewest) best = k, fewest = bits;
  }
  return best;
}

// The same as in stages/places/places_scalar.h.
void write_places(const uint16_t* places, size_t count, size_t length, RiceWriter& writer) {
  const hn::CappedTag<uint32_t, 16> d;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  const hn::Repartition<uint64_t, decltype(d)> d64;
  constexpr size_t kLanes = hn::MaxLanes(d);
  const int k = best_gap_k(places, count, GapChoices(length + 1 - count, count));
  writer.put(0, static_cast<uint64_t>(k), kRiceHeadBits);
  writer.flush();
  const auto escape = hn::Set(d, kRiceEscape);
  const auto low_mask = hn::Set(d, (1u << k) - 1);
  const auto one = hn::Set(d, 1);
  const auto lower = hn::Set(d64, 0xffffffffu);
  alignas(64) uint64_t pairs[kLanes / 2];
  alignas(64) uint64_t pair_lengths[kLanes / 2];
  alignas(64) uint32_t codes[kLanes];
  alignas(64) uint32_t code_lengths[kLanes];
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto gap = hn::PromoteTo(d, gaps_before(d16, places + i));
    const auto zeros = hn::Min(hn::ShiftRightSame(gap, k), escape);
    const auto escaped = hn::Eq(zeros, escape);
    const auto low = hn::And(gap, low_mask);
    const auto rest = hn::IfThenElse(escaped, gap, hn::Or(hn::Add(low, low), one));
    const auto code = hn::Shl(rest, zeros);
    const auto size = hn::IfThenElse(escaped, hn::Set(d, kLongestGapCode),
                                     hn::Add(zeros, hn::Set(d, static_cast<uint32_t>(k + 1))));
    if (HWY_UNLIKELY(count - i < hn::Lanes(d))) {
      hn::Store(code, d, codes);
      hn::Store(size, d, code_lengths);
      for (size_t j = 0; j < count - i; ++j) {
        writer.put(0, codes[j], code_lengths[j]);
        writer.flush();
      }
      return;
    }
    // Two codes in each lane, then four.
    const auto first = hn::And(hn::BitCast(d64, code), lower);
    const auto first_size = hn::And(hn::BitCast(d64, size), lower);
    const auto second = hn::ShiftRight<32>(hn::BitCast(d64, code));
    const auto second_size = hn::ShiftRight<32>(hn::BitCast(d64, size));
    hn::Store(hn::Or(first, hn::Shl(second, first_size)), d64, pairs);
    hn::Store(hn::Add(first_size, second_size), d64, pair_lengths);
    for (size_t j = 0; j < hn::Lanes(d64); j += 2) {
      const auto one_length = static_cast<uint32_t>(pair_lengths[j]);
      const auto other_length = static_cast<uint32_t>(pair_lengths[j + 1]);
      if (HWY_LIKELY(one_length + other_length <= kMostBetweenFlushes)) {
        writer.put(0, pairs[j] | pairs[j + 1] << one_length, one_length + other_length);
      } else {
        writer.put(0, pairs[j], one_length);
        writer.flush();
        writer.put(0, pairs[j + 1], other_length);
      }
      writer.flush();
    }
  }
}

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL

struct Numbers64 {
  alignas(64) uint8_t of[64] = {};
  constexpr Numbers64() {
    for (int i = 0; i < 64; ++i) of[i] = static_cast<uint8_t>(i);
  }
};
inline constexpr Numbers64 kNumbers64;

// The same as in stages/places/places_bits.h.
HWY_INLINE size_t append_places(uint64_t word, size_t first, uint16_t* places) {
  const __m512i kept = _mm512_maskz_compress_epi8(word, _mm512_load_si512(kNumbers64.of));
  const __m512i base = _mm512_set1_epi16(static_cast<int16_t>(first));
  const auto count = static_cast<size_t>(std::popcount(word));
  const __m512i head = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(kept));
  _mm512_storeu_si512(places, _mm512_add_epi16(base, head));
  if (HWY_UNLIKELY(count > 32)) {
    const __m512i tail = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(kept, 1));
    _mm512_storeu_si512(places + 32, _mm512_add_epi16(base, tail));
  }
  return count;
}

#endif

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2

HWY_INLINE uint64_t gather_word(uint64_t word, uint64_t mask) { return _pext_u64(word, mask); }
HWY_INLINE uint64_t spread_word(uint64_t bits, uint64_t mask) { return _pdep_u64(bits, mask); }

#endif

size_t encode_places(const uint64_t* bits, size_t n, size_t count, uint8_t* out) {
  return encode_place_runs(bits, n, count, out, append_places, write_places);
}

void collect_marks(const uint8_t* marks, size_t words, uint64_t* bits) {
  const hn::CappedTag<uint8_t, kWordBits> d;
  const auto zero = hn::Zero(d);
  for (size_t word = 0; word < words; ++word) {
    auto* bytes = reinterpret_cast<uint8_t*>(bits + word);
    for (size_t i = 0; i < kWordBits; i += hn::Lanes(d)) {
      const auto mark = hn::LoadU(d, marks + word * kWordBits + i);
      hn::StoreMaskBits(d, hn::Ne(mark, zero), bytes + i / 8);
    }
  }
}

size_t decode_places(const uint8_t* bytes, size_t size, size_t n, uint64_t* bits, size_t& count) {
  const size_t taken = decode_place_runs(bytes, size, n, bits, collect_marks);
  count = taken == 0 ? 0 : count_bits(bits, trit_words(n));
  return taken;
}

// Far steps are few: most words have none.
size_t list_places(const uint64_t* bits, size_t words, uint16_t* places) {
  return list_set_bits(bits, words, places, gradwire::append_places);
}

void gather_bits(const uint64_t* bits, const uint64_t* mask, size_t words, uint8_t* out) {
  gather_words(bits, mask, words, out, gather_word);
}

void spread_bits(const uint8_t* gathered, const uint64_t* mask, size_t words, uint64_t* bits) {
  spread_words(gathered, mask, words, bits, spread_word);
}

size_t write_far_sizes(const uint32_t* sizes, size_t count, uint8_t* out) {
  return write_size_strings(sizes, count, out);
}

bool read_far_sizes(const uint8_t* bytes, size_t size, uint32_t largest, uint32_t* sizes,
                    size_t count) {
  return read_size_strings(bytes, size, largest, sizes, count);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
