// Packed trits and zero-run codes to floats, for one SIMD target. Contracts: stages/kernels.def.
//
// Codes are handled 512 at a time, in two passes. The first pass has no branch on the data; it
// lists the places of the trits that are not zero: bytes with one such trit in a list for +1 or for
// -1, bytes with more in a third list. The second pass follows the lists in independent steps of
// three instructions; so many of them run at the same time that a prefetch gained nothing. Packed
// bytes are handled as codes that all stand for one byte. A byte above 242 would stand for more
// bytes, so the length comes out wrong and the input is refused.

#if defined(GRADWIRE_STAGES_ZERO_RUN_UNPACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_ZERO_RUN_UNPACK_INL_H_
#undef GRADWIRE_STAGES_ZERO_RUN_UNPACK_INL_H_
#else
#define GRADWIRE_STAGES_ZERO_RUN_UNPACK_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/output-inl.h"
#include "stages/trits/trit.h"
#include "stages/trits/trits_scalar.h"
#include "stages/zero_run/zero_run.h"
#include "stages/zero_run/zero_run_tables.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

constexpr size_t kGroupCodes = 512;
static_assert(kGroupCodes * kLongestRun * kTritsPerByte <= 65536, "places are 16 bits");

// A place counts floats from the start of the group's output. The slack is for whole vectors.
struct TritLists {
  static constexpr size_t kSlack = 64;
  uint16_t plus[kGroupCodes + kSlack];
  uint16_t minus[kGroupCodes + kSlack];
  uint16_t mixed[kGroupCodes + kSlack];  // place of the first of a byte's five trits
  uint8_t mixed_bytes[kGroupCodes + kSlack];
  size_t plus_count, minus_count, mixed_count;
  size_t packed;  // bytes that the codes stand for
};

// Bytes 121 +- d with d = 81, 27, 9, 3 or 1 have one trit that isn't zero. The lower half of d ^ d
// >> 4 differs for these d: at that index the tables hold d, and the trit's place in the byte.
alignas(16) constexpr uint8_t kLoneWeights[16] = {255, 1, 255, 3,   81,  255, 255, 255,
                                                  255, 9, 27,  255, 255, 255, 255, 255};
alignas(16) constexpr uint8_t kLonePlaces[16] = {0, 4, 0, 3, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0};

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL

constexpr size_t kListStep = 64;

// Appends the 16-bit lanes whose bit in `keep` is set.
HWY_INLINE void append(__m512i lower, __m512i upper, uint64_t keep, uint16_t* list, size_t& count) {
  const uint32_t keep_lower = static_cast<uint32_t>(keep);
  const uint32_t keep_upper = static_cast<uint32_t>(keep >> 32);
  _mm512_storeu_si512(list + count, _mm512_maskz_compress_epi16(keep_lower, lower));
  count += hwy::PopCount(keep_lower);
  _mm512_storeu_si512(list + count, _mm512_maskz_compress_epi16(keep_upper, upper));
  count += hwy::PopCount(keep_upper);
}

HWY_INLINE __m512i widen_lower(__m512i v) {
  return _mm512_cvtepu8_epi16(_mm512_castsi512_si256(v));
}

HWY_INLINE __m512i widen_upper(__m512i v) {
  return _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(v, 1));
}

// Lists the trits of `count` codes, a multiple of kListStep.
HWY_INLINE void list_trits(const uint8_t* codes, size_t count, TritLists& lists) {
  size_t plus_count = 0;
  size_t minus_count = 0;
  size_t mixed_count = 0;
  const __m512i zero_byte = _mm512_set1_epi8(kZeroByte);
  const __m512i five = _mm512_set1_epi16(kTritsPerByte);
  const __m512i weights =
      _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kLoneWeights)));
  const __m512i places =
      _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kLonePlaces)));
  const __m512i eights_lower = _mm512_load_si512(kEights.lower);
  const __m512i eights_upper = _mm512_load_si512(kEights.upper);
  __m512i packed = _mm512_setzero_si512();  // so far, in all 64-bit lanes
  for (size_t i = 0; i < count; i += kListStep) {
    const __m512i code = _mm512_loadu_si512(codes + i);
    // Prefix sums of the lengths: in eights by a product (at most 8 * 14), then over the eights.
    const __m512i length = _mm512_max_epu8(
        _mm512_subs_epu8(code, _mm512_set1_epi8(static_cast<char>(kRunBase - kShortestRun))),
        _mm512_set1_epi8(1));
    const __m512i within = _mm512_mullo_epi64(length, _mm512_set1_epi64(0x0101010101010101));
    const __m512i eight = _mm512_srli_epi64(within, 56);
    __m512i sum = eight;
    sum = _mm512_add_epi64(sum, _mm512_maskz_alignr_epi64(0xfe, sum, sum, 7));
    sum = _mm512_add_epi64(sum, _mm512_maskz_alignr_epi64(0xfc, sum, sum, 6));
    sum = _mm512_add_epi64(sum, _mm512_maskz_alignr_epi64(0xf0, sum, sum, 4));
    const __m512i base = _mm512_add_epi64(packed, _mm512_sub_epi64(sum, eight));
    packed = _mm512_add_epi64(packed, _mm512_permutexvar_epi64(_mm512_set1_epi64(7), sum));
    const __m512i before = _mm512_sub_epi8(within, length);
    const __m512i lower = _mm512_mullo_epi16(
        five, _mm512_add_epi16(widen_lower(before), _mm512_permutexvar_epi16(eights_lower, base)));
    const __m512i upper = _mm512_mullo_epi16(
        five, _mm512_add_epi16(widen_upper(before), _mm512_permutexvar_epi16(eights_upper, base)));

    const __m512i over = _mm512_subs_epu8(code, zero_byte);
    const __m512i under = _mm512_subs_epu8(zero_byte, code);
    const __m512i d = _mm512_or_si512(over, under);
    const __m512i key =
        _mm512_and_si512(_mm512_xor_si512(d, _mm512_srli_epi16(d, 4)), _mm512_set1_epi8(15));
    const uint64_t lone =
        _cvtmask64_u64(_mm512_cmpeq_epi8_mask(_mm512_shuffle_epi8(weights, key), d));
    const uint64_t below = _cvtmask64_u64(_mm512_test_epi8_mask(under, under));
    const uint64_t literal = _cvtmask64_u64(_mm512_mask_cmplt_epu8_mask(
        _mm512_test_epi8_mask(d, d), code, _mm512_set1_epi8(static_cast<char>(kRunBase))));
    const __m512i place = _mm512_shuffle_epi8(places, key);
    const __m512i lone_lower = _mm512_add_epi16(lower, widen_lower(place));
    const __m512i lone_upper = _mm512_add_epi16(upper, widen_upper(place));
    append(lone_lower, lone_upper, lone & ~below, lists.plus, plus_count);
    append(lone_lower, lone_upper, lone & below, lists.minus, minus_count);
    const uint64_t mixed = literal & ~lone;
    _mm512_storeu_si512(lists.mixed_bytes + mixed_count,
                        _mm512_maskz_compress_epi8(_cvtu64_mask64(mixed), code));
    append(lower, upper, mixed, lists.mixed, mixed_count);
  }
  lists.plus_count = plus_count;
  lists.minus_count = minus_count;
  lists.mixed_count = mixed_count;
  lists.packed = static_cast<size_t>(_mm_cvtsi128_si64(_mm512_castsi512_si128(packed)));
}

#else

constexpr size_t kListStep = 16;

// Appends the 16-bit lanes whose bit in `keep` is set.
template <class V16>
HWY_INLINE void append(V16 lower, V16 upper, size_t keep, uint16_t* list, size_t& count) {
  store_kept_16(lower, keep & 255, list, count);
  store_kept_16(upper, keep >> 8 & 255, list, count);
}

// Lists the trits of `count` codes, a multiple of kListStep.
HWY_INLINE void list_trits(const uint8_t* codes, size_t count, TritLists& lists) {
  const hn::Full128<uint8_t> d8;
  const hn::Half<decltype(d8)> d8_half;
  const hn::Full128<uint16_t> d16;
  size_t plus_count = 0;
  size_t minus_count = 0;
  size_t mixed_count = 0;
  size_t packed = 0;
  const auto zero_byte = hn::Set(d8, kZeroByte);
  for (size_t i = 0; i < count; i += kListStep) {
    const auto code = hn::LoadU(d8, codes + i);
    // Prefix sums of the lengths, at most 16 * 14.
    const auto length =
        hn::Max(hn::SaturatedSub(code, hn::Set(d8, kRunBase - kShortestRun)), hn::Set(d8, 1));
    auto sum = length;
    sum = hn::Add(sum, hn::ShiftLeftBytes<1>(d8, sum));
    sum = hn::Add(sum, hn::ShiftLeftBytes<2>(d8, sum));
    sum = hn::Add(sum, hn::ShiftLeftBytes<4>(d8, sum));
    sum = hn::Add(sum, hn::ShiftLeftBytes<8>(d8, sum));
    const auto before = hn::Sub(sum, length);
    const auto base = hn::Set(d16, static_cast<uint16_t>(packed));
    const auto five = hn::Set(d16, kTritsPerByte);
    const auto lower =
        hn::Mul(five, hn::Add(base, hn::PromoteTo(d16, hn::LowerHalf(d8_half, before))));
    const auto upper =
        hn::Mul(five, hn::Add(base, hn::PromoteTo(d16, hn::UpperHalf(d8_half, before))));
    packed += hn::ExtractLane(sum, 15);

    const auto under = hn::SaturatedSub(zero_byte, code);
    const auto d = hn::Or(hn::SaturatedSub(code, zero_byte), under);
    const auto d_shifted = hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, d)));
    const auto key = hn::And(hn::Xor(d, d_shifted), hn::Set(d8, 15));
    const auto is_lone = hn::Eq(hn::TableLookupBytes(hn::Load(d8, kLoneWeights), key), d);
    const size_t lone = static_cast<size_t>(bits_of_mask(d8, is_lone));
    const size_t above = static_cast<size_t>(bits_of_mask(d8, hn::Eq(under, hn::Zero(d8))));
    const size_t zeros = static_cast<size_t>(bits_of_mask(d8, hn::Eq(code, zero_byte)));
    const size_t literal =
        ~zeros & static_cast<size_t>(bits_of_mask(
                     d8, hn::Eq(hn::Min(code, hn::Set(d8, kLargestPackedByte)), code)));
    const auto place = hn::TableLookupBytes(hn::Load(d8, kLonePlaces), key);
    const auto lone_lower = hn::Add(lower, hn::PromoteTo(d16, hn::LowerHalf(d8_half, place)));
    const auto lone_upper = hn::Add(upper, hn::PromoteTo(d16, hn::UpperHalf(d8_half, place)));
    append(lone_lower, lone_upper, lone & above, lists.plus, plus_count);
    append(lone_lower, lone_upper, lone & ~above, lists.minus, minus_count);
    const size_t mixed = literal & ~lone;
    size_t at = mixed_count;
    store_kept(d8, code, mixed, lists.mixed_bytes, at);
    append(lower, upper, mixed, lists.mixed, mixed_count);
  }
  lists.plus_count = plus_count;
  lists.minus_count = minus_count;
  lists.mixed_count = mixed_count;
  lists.packed = packed;
}

#endif

template <class Output>
HWY_INLINE void put_lone(const uint16_t* list, size_t count, float value, Output to) {
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    to.put(value, list[i]);
    to.put(value, list[i + 1]);
    to.put(value, list[i + 2]);
    to.put(value, list[i + 3]);
  }
  for (; i < count; ++i) to.put(value, list[i]);
}

// A row of five floats is handled as a vector of four floats and a single float, so that nothing
// after the span is touched and no load waits for a wider store just before it.
template <class Output>
HWY_INLINE void put_lists(const TritLists& lists, const TritRows& rows, float m, Output to) {
  const hn::Full128<float> d;
  put_lone(lists.plus, lists.plus_count, m, to);
  put_lone(lists.minus, lists.minus_count, -m, to);
  for (size_t i = 0; i < lists.mixed_count; ++i) {
    const float* row = rows.rows[lists.mixed_bytes[i]];
    const Output first{{to.out + lists.mixed[i]}};
    first.put(d, hn::Mul(hn::Load(d, row), hn::Set(d, m)), 0);
    first.put(row[4] * m, 4);
  }
}

// Lists the `count` codes of a group.
HWY_INLINE void list_group(const uint8_t* codes, size_t count, TritLists& lists) {
  const size_t padding = (kListStep - count % kListStep) % kListStep;
  if (padding == 0) return list_trits(codes, count, lists);
  uint8_t padded[kGroupCodes];
  std::memcpy(padded, codes, count);
  std::memset(padded + count, kZeroByte, padding);
  list_trits(padded, count + padding, lists);
  lists.packed -= padding;
}

bool zero_run_unpack(const uint8_t* codes, size_t size, size_t n, float m, float* out,
                     DecodeMode mode) {
  TritLists lists;
  size_t left = packed_size(n);
  // A last byte with fewer than five values is handled at the end.
  const size_t short_values = n % kTritsPerByte;
  const bool short_last = short_values != 0 && size != 0 && codes[size - 1] < kRunBase;
  if (short_last) --size;
  for (size_t first = 0; first < size; first += kGroupCodes) {
    const size_t count = HWY_MIN(kGroupCodes, size - first);
    list_group(codes + first, count, lists);
    // Each code that follows stands for at least a byte, so all listed bytes have five values.
    const bool more = short_last || first + count != size;
    if (lists.packed + static_cast<size_t>(more) > left) return false;
    left -= lists.packed;
    const size_t values = HWY_MIN(n, lists.packed * kTritsPerByte);
    if (mode == DecodeMode::kAdd) {
      put_lists(lists, kRowsToAdd, m, AddTo{{out}});
    } else {
      std::memset(out, 0, values * sizeof *out);
      put_lists(lists, kRowsToStore, m, StoreTo{{out}});
    }
    out += values;
    n -= values;
  }
  if (!short_last) return left == 0;
  return left == 1 && scalar::unpack(codes + size, short_values, m, out, mode);
}

bool unpack(const uint8_t* packed, size_t n, float m, float* out, DecodeMode mode) {
  return zero_run_unpack(packed, packed_size(n), n, m, out, mode);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
