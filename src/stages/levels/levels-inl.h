// Stochastic quantization to levels, their packing and their values, for one SIMD target.
// Contracts: stages/kernels.def.

#include <cstring>

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/output-inl.h"
#include "stages/levels/levels.h"
#include "stages/levels/levels_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// Rounds values within the range of int32 to integers, towards 0; other values become any integer.
// On x86, Highway's ConvertTo spends three more instructions on these.
template <class D32, class V>
HWY_INLINE hn::Vec<D32> truncate(D32 d32, V v) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return hn::Vec<D32>{_mm512_cvttps_epi32(v.raw)};
#elif HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  return hn::Vec<D32>{_mm256_cvttps_epi32(v.raw)};
#elif HWY_ARCH_X86
  return hn::Vec<D32>{_mm_cvttps_epi32(v.raw)};
#else
  return hn::ConvertTo(d32, v);
#endif
}

// The levels of a vector of values, drawn with their random words. Values beyond the norm have any
// level (stages/levels/levels.h says where they come from), so the caller clamps all levels. That
// takes the fewest instructions where levels are bytes.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> levels_of(D d, const float* x, const uint32_t* words,
                                                    hn::Vec<D> prescale, hn::Vec<D> inverse) {
  const hn::RebindToSigned<D> d32;
  const hn::RebindToUnsigned<D> du32;
  const auto fixed = truncate(d32, hn::Mul(hn::Mul(hn::LoadU(d, x), prescale), inverse));
  const auto upper =
      hn::BitCast(d32, hn::ShiftRight<32 - kByteLevelFraction>(hn::LoadU(du32, words)));
  return hn::ShiftRight<kByteLevelFraction>(hn::Add(fixed, upper));
}

// Each lane, or -s or s if the lane is beyond.
template <class D, class V>
HWY_INLINE V clamp_levels(D d, V levels, int32_t s) {
  using Level = hn::TFromD<D>;
  return hn::Min(hn::Max(levels, hn::Set(d, static_cast<Level>(-s))),
                 hn::Set(d, static_cast<Level>(s)));
}

// Stores the lanes of four vectors as bytes from -s to s, in order.
template <class D, class V32>
HWY_INLINE void store_bytes(D, V32 v0, V32 v1, V32 v2, V32 v3, int32_t s, int8_t* to) {
  const hn::Repartition<int16_t, D> d16;
#if HWY_ARCH_X86
  const hn::Repartition<int8_t, D> d8;
  // Block i of 16 bytes gets the bytes of block i of each vector.
  const auto lower = hn::ReorderDemote2To(d16, v0, v1);
  const auto upper = hn::ReorderDemote2To(d16, v2, v3);
#if HWY_TARGET <= HWY_AVX3
  const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i blocks = _mm512_packs_epi16(lower.raw, upper.raw);
  const hn::Vec<decltype(d8)> bytes{_mm512_permutexvar_epi32(places, blocks)};
#elif HWY_TARGET <= HWY_AVX2
  const __m256i places = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i blocks = _mm256_packs_epi16(lower.raw, upper.raw);
  const hn::Vec<decltype(d8)> bytes{_mm256_permutevar8x32_epi32(blocks, places)};
#else
  const hn::Vec<decltype(d8)> bytes{_mm_packs_epi16(lower.raw, upper.raw)};
#endif
  hn::StoreU(clamp_levels(d8, bytes, s), d8, to);
#else
  const hn::Half<decltype(d16)> half;
  const hn::Rebind<int8_t, decltype(d16)> half8;
  const auto lower = hn::Combine(d16, hn::DemoteTo(half, v1), hn::DemoteTo(half, v0));
  const auto upper = hn::Combine(d16, hn::DemoteTo(half, v3), hn::DemoteTo(half, v2));
  hn::StoreU(clamp_levels(half8, hn::DemoteTo(half8, lower), s), half8, to);
  hn::StoreU(clamp_levels(half8, hn::DemoteTo(half8, upper), s), half8, to + hn::Lanes(d16));
#endif
}

void quantize_levels(const float* x, size_t n, LevelScale scale, const uint32_t* words,
                     int8_t* levels) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto prescale = hn::Set(d, scale.prescale);
  const auto inverse = hn::Set(d, scale.inverse);
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    store_bytes(d, levels_of(d, x + i, words + i, prescale, inverse),
                levels_of(d, x + i + lanes, words + i + lanes, prescale, inverse),
                levels_of(d, x + i + 2 * lanes, words + i + 2 * lanes, prescale, inverse),
                levels_of(d, x + i + 3 * lanes, words + i + 3 * lanes, prescale, inverse),
                scale.largest, levels + i);
  }
  const hn::Rebind<int8_t, decltype(d)> d8;
  for (; i + lanes <= n; i += lanes) {
    const auto level = levels_of(d, x + i, words + i, prescale, inverse);
    hn::StoreU(clamp_levels(d8, hn::DemoteTo(d8, level), scale.largest), d8, levels + i);
  }
  for (; i < n; ++i) levels[i] = static_cast<int8_t>(level_of(x[i], scale, words[i]));
}

void quantize_wide_levels(const float* x, size_t n, LevelScale scale, const uint32_t* words,
                          int16_t* levels) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> d32;
  const hn::RebindToUnsigned<decltype(d)> du32;
  const hn::Rebind<int16_t, decltype(d)> d16;
  const size_t lanes = hn::Lanes(d);
  const auto prescale = hn::Set(d, scale.prescale);
  const auto inverse = hn::Set(d, scale.inverse);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto fixed = truncate(d32, hn::Mul(hn::Mul(hn::LoadU(d, x + i), prescale), inverse));
    const auto upper = hn::ShiftRightSame(hn::LoadU(du32, words + i), 32 - scale.fraction);
    const auto level = hn::ShiftRightSame(hn::Add(fixed, hn::BitCast(d32, upper)), scale.fraction);
    hn::StoreU(clamp_levels(d16, hn::DemoteTo(d16, level), scale.largest), d16, levels + i);
  }
  scalar::quantize_levels(x + i, n - i, scale, words + i, levels + i);
}

void scale_levels(const int8_t* levels, size_t n, float unit, float* out, DecodeMode mode) {
  const size_t i = put_vectors(out, n, mode, [=](auto d, size_t at) HWY_ATTR {
    const hn::RebindToSigned<decltype(d)> d32;
    const hn::Rebind<int8_t, decltype(d)> d8;
    const auto level = hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, levels + at)));
    return hn::Mul(level, hn::Set(d, unit));
  });
  scalar::scale_levels(levels + i, n - i, unit, out + i, mode);
}

void scale_wide_levels(const int16_t* levels, size_t n, float unit, float* out, DecodeMode mode) {
  const size_t i = put_vectors(out, n, mode, [=](auto d, size_t at) HWY_ATTR {
    const hn::RebindToSigned<decltype(d)> d32;
    const hn::Rebind<int16_t, decltype(d)> d16;
    const auto level = hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d16, levels + at)));
    return hn::Mul(level, hn::Set(d, unit));
  });
  scalar::scale_levels(levels + i, n - i, unit, out + i, mode);
}

// Levels are packed eight at a time: a 64-bit lane of bytes becomes `width` bytes.

// For each byte of a vector, the place that it comes from: when every eight bytes are joined to
// `width` bytes, and when they are split again.
struct GroupPlaces {
  alignas(64) uint8_t joined[kLargestByteLevelWidth + 1][64] = {};
  alignas(64) uint8_t split[kLargestByteLevelWidth + 1][64] = {};

  constexpr GroupPlaces() {
    for (size_t width = 1; width <= kLargestByteLevelWidth; ++width) {
      for (size_t i = 0; i < 64; ++i) {
        const size_t from = i / width * 8 + i % width;
        const size_t to = i / 8 * width + i % 8;
        joined[width][i] = static_cast<uint8_t>(from < kPackedLanes ? from : 0);
        split[width][i] = static_cast<uint8_t>(to < kPackedLanes ? to : 0);
      }
    }
  }
};
inline constexpr GroupPlaces kGroupPlaces;

HWY_INLINE PackedVec take_bytes(PackedVec v, PackedVec places) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
  return PackedVec{_mm512_permutexvar_epi8(places.raw, v.raw)};
#else
  return hn::TableLookupBytes(v, places);
#endif
}

// The eight codes of each 64-bit lane, joined to 8 * width bits at its lower end.
HWY_INLINE PackedVec join_codes(PackedVec codes, int width) {
  const PackedTag d8;
  const hn::RepartitionToWide<decltype(d8)> d16;
  const hn::RepartitionToWide<decltype(d16)> d32;
  const hn::RepartitionToWide<decltype(d32)> d64;
  const auto v16 = hn::BitCast(d16, codes);
  const auto v32 = hn::BitCast(d32, hn::Or(hn::And(v16, hn::Set(d16, 0xff)),
                                           hn::ShiftLeftSame(hn::ShiftRight<8>(v16), width)));
  const auto v64 = hn::BitCast(d64, hn::Or(hn::And(v32, hn::Set(d32, 0xffff)),
                                           hn::ShiftLeftSame(hn::ShiftRight<16>(v32), 2 * width)));
  return hn::BitCast(d8, hn::Or(hn::And(v64, hn::Set(d64, 0xffffffffu)),
                                hn::ShiftLeftSame(hn::ShiftRight<32>(v64), 4 * width)));
}

// Undoes join_codes.
HWY_INLINE PackedVec split_codes(PackedVec joined, int width) {
  const PackedTag d8;
  const auto mask = hn::Set(d8, static_cast<uint8_t>((1 << width) - 1));
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
  const __m512i offsets = _mm512_set1_epi64(0x0706050403020100 * width);
  return hn::And(PackedVec{_mm512_multishift_epi64_epi8(offsets, joined.raw)}, mask);
#else
  const hn::RepartitionToWide<decltype(d8)> d16;
  const hn::RepartitionToWide<decltype(d16)> d32;
  const hn::RepartitionToWide<decltype(d32)> d64;
  const auto v64 = hn::BitCast(d64, joined);
  const auto lower64 = hn::And(v64, hn::Set(d64, (uint64_t{1} << 4 * width) - 1));
  const auto upper64 = hn::ShiftLeft<32>(hn::ShiftRightSame(v64, 4 * width));
  const auto v32 = hn::BitCast(d32, hn::Or(lower64, upper64));
  const auto lower32 = hn::And(v32, hn::Set(d32, (1u << 2 * width) - 1));
  const auto upper32 = hn::ShiftLeft<16>(hn::ShiftRightSame(v32, 2 * width));
  const auto v16 = hn::BitCast(d16, hn::Or(lower32, upper32));
  const auto upper16 = hn::ShiftLeft<8>(hn::ShiftRightSame(v16, width));
  const auto lower16 = hn::AndNot(hn::Set(d16, 0xff00), v16);
  return hn::And(hn::BitCast(d8, hn::Or(lower16, upper16)), mask);
#endif
}

void pack_levels(const int8_t* levels, size_t n, int32_t s, uint8_t* packed) {
  const PackedTag d8;
  const int width = level_width(s);
  const size_t step = kPackedLanes / 8 * static_cast<size_t>(width);
  const auto places = hn::Load(d8, kGroupPlaces.joined[width]);
  const auto offset = hn::Set(d8, static_cast<uint8_t>(s));
  const size_t size = packed_levels_size(n, width);
  size_t i = 0;
  size_t at = 0;
  // Each store writes a whole vector; the next store overwrites all but its first `step` bytes.
  for (; i + kPackedLanes <= n && at + kPackedLanes <= size; i += kPackedLanes, at += step) {
    const auto bytes = hn::LoadU(d8, reinterpret_cast<const uint8_t*>(levels + i));
    const auto joined = join_codes(hn::Add(bytes, offset), width);
    hn::StoreU(take_bytes(joined, places), d8, packed + at);
  }
  scalar::pack_levels(levels + i, n - i, s, packed + at);
}

bool unpack_levels(const uint8_t* packed, size_t n, int32_t s, int8_t* levels) {
  const PackedTag d8;
  const int width = level_width(s);
  const size_t step = kPackedLanes / 8 * static_cast<size_t>(width);
  const auto places = hn::Load(d8, kGroupPlaces.split[width]);
  const auto offset = hn::Set(d8, static_cast<uint8_t>(s));
  const size_t size = packed_levels_size(n, width);
  auto largest = hn::Zero(d8);
  size_t i = 0;
  size_t at = 0;
  for (; i + kPackedLanes <= n && at + kPackedLanes <= size; i += kPackedLanes, at += step) {
    const auto joined = take_bytes(hn::LoadU(d8, packed + at), places);
    const auto codes = split_codes(joined, width);
    largest = hn::Max(largest, codes);
    hn::StoreU(hn::Sub(codes, offset), d8, reinterpret_cast<uint8_t*>(levels + i));
  }
  const auto allowed = hn::Set(d8, static_cast<uint8_t>(2 * s));
  return hn::AllTrue(d8, hn::Eq(hn::Max(largest, allowed), allowed)) &&
         scalar::unpack_levels(packed + at, n - i, s, levels + i);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
