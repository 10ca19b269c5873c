// INCEPTIONN's bursts, for one SIMD target. Contracts: stages/kernels.def.
//
// Codes are cut from vectors of 32-bit lanes: the bits of a value that is 1 or more, else `fixed`.
// Of a lane's four bytes, byte 0 the lowest, a code takes byte 2 (8 bits), bytes 1 and 2 (16 bits)
// or all (32 bits). So packing a burst moves the kept bytes together, and unpacking moves them
// back.

#include "hwy/highway.h"

#include "stages/element/float_bits.h"
#include "stages/element/load-inl.h"
#include "stages/element/output-inl.h"
#include "stages/float_clip/float_clip.h"
#include "stages/float_clip/float_clip_scalar.h"
#include "stages/float_clip/float_clip_tables.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL

using ClipTag = hn::FixedTag<float, 8>;
constexpr size_t kBurstsAtOnce = 2;

// The top bit of each byte of a lane that a tag keeps.
constexpr uint32_t kKeep8 = 0x00800000u;
constexpr uint32_t kKeep16 = 0x00808000u;
constexpr uint32_t kKeep32 = 0x80808080u;

HWY_INLINE __m512i set_lanes(uint32_t v) { return _mm512_set1_epi32(static_cast<int>(v)); }

// Writes tags and codes of a burst; 34 bytes may be written. vpcompressb writes to a register,
// because its stores are slow on some CPUs.
HWY_INLINE void store_burst(uint32_t tags, __mmask32 keep, __m256i codes, uint8_t* out) {
  store_unaligned(reinterpret_cast<uint16_t*>(out), static_cast<uint16_t>(tags));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + kBurstTagBytes),
                      _mm256_maskz_compress_epi8(keep, codes));
}

// A FloatClip as vectors for a table look-up; comparisons to masks would all wait for the same port
// of the CPU.
struct ClipLanes {
  __m512i keep_of;  // top bits of the kept bytes, for the exponents `base` to `base` + 15
  __m512i base;     // smaller exponents are treated as the first, larger ones as the last
  __m512i cut;

  explicit ClipLanes(const FloatClip& clip)
      : base(set_lanes((clip.smallest >> 23) - 1)), cut(set_lanes(clip.cut)) {
    alignas(64) uint32_t keep[16];
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t magnitude = clip.smallest + (i << 23) - (1u << 23);
      keep[i] = magnitude >= kOneBits        ? kKeep32
                : magnitude >= clip.wide     ? kKeep16
                : magnitude >= clip.smallest ? kKeep8
                                             : 0;
    }
    keep_of = _mm512_load_si512(keep);
  }
};

HWY_INLINE size_t encode_bursts(const float* x, const ClipLanes& clip, uint8_t* out) {
  const __m512i bits = _mm512_loadu_si512(x);
  const __m512i magnitude = _mm512_and_si512(bits, set_lanes(0x7fffffffu));
  const __m512i shifted = _mm512_cvttps_epi32(
      _mm512_mul_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(1.0f / kFixedUnit)));
  const __m512i place = _mm512_min_epu32(
      _mm512_subs_epu16(_mm512_srli_epi32(magnitude, 23), clip.base), set_lanes(15));
  // Bit 15 is set where a bit must not be cut off.
  const __m512i cuts = _mm512_adds_epu16(_mm512_and_si512(shifted, clip.cut), set_lanes(0x7fffu));
  // keep_of[place] | (cuts & 0x8000)
  const __m512i keep_bits = _mm512_ternarylogic_epi32(_mm512_permutexvar_epi32(place, clip.keep_of),
                                                      cuts, set_lanes(0x8000u), 0xf8);
  // shifted | (bits >> 8 & kFixedSign)
  const __m512i fixed =
      _mm512_ternarylogic_epi32(shifted, _mm512_srli_epi32(bits, 8), set_lanes(kFixedSign), 0xf8);
  // Lanes of ones choose `bits`, lanes of zeros `fixed`.
  const __m512i codes =
      _mm512_ternarylogic_epi32(_mm512_srai_epi32(keep_bits, 31), bits, fixed, 0xca);
  const __mmask64 keep = _mm512_movepi8_mask(keep_bits);
  // Of a lane's four bits, bit 1 is the upper bit of its tag, and bits 0, 1 and 2 add up to the
  // lower.
  const uint64_t keep64 = _cvtmask64_u64(keep);
  const uint64_t lower = (keep64 ^ keep64 >> 1 ^ keep64 >> 2) & 0x1111111111111111u;
  const uint64_t tags = _pext_u64(lower | (keep64 & 0x2222222222222222u), 0x3333333333333333u);
  uint8_t* second = out + kBurstTagBytes + _mm_popcnt_u32(static_cast<uint32_t>(keep64));
  store_burst(static_cast<uint32_t>(tags), static_cast<__mmask32>(keep),
              _mm512_castsi512_si256(codes), out);
  store_burst(static_cast<uint32_t>(tags >> 16), static_cast<__mmask32>(_kshiftri_mask64(keep, 32)),
              _mm512_extracti64x4_epi64(codes, 1), second);
  return 2 * kBurstTagBytes + static_cast<size_t>(_mm_popcnt_u64(keep64));
}

// Calls take(values, i) for the values of a full burst, where 34 bytes may be read.
template <typename Take>
HWY_INLINE void decode_full_burst(const uint8_t* burst, const Take& take) {
  const uint16_t tags = load_unaligned(reinterpret_cast<const uint16_t*>(burst));
  // Each lane's tag in its low two bits. The look-up sees a third bit too, which makes no
  // difference because the table holds everything twice.
  const __m256i lane_tags = _mm256_srlv_epi32(_mm256_set1_epi16(static_cast<int16_t>(tags)),
                                              _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
  constexpr int kKept[] = {0, static_cast<int>(kKeep8), static_cast<int>(kKeep16),
                           static_cast<int>(kKeep32)};
  const __m256i keep = _mm256_permutexvar_epi32(
      lane_tags, _mm256_setr_epi32(kKept[0], kKept[1], kKept[2], kKept[3], kKept[0], kKept[1],
                                   kKept[2], kKept[3]));
  const __m256i bytes =
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(burst + kBurstTagBytes));
  const __m256i codes = _mm256_maskz_expand_epi8(_mm256_movepi8_mask(keep), bytes);
  const __m256i magnitude =
      _mm256_and_si256(codes, _mm256_set1_epi32(static_cast<int>(kFixedSign - 1)));
  const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(kFixedUnit));
  // value | (codes << 8 & sign)
  const __m256i narrow =
      _mm256_ternarylogic_epi32(_mm256_castps_si256(value), _mm256_slli_epi32(codes, 8),
                                _mm256_set1_epi32(static_cast<int>(0x80000000u)), 0xf8);
  const __m256i all = _mm256_mask_mov_epi32(narrow, _mm256_movepi32_mask(keep), codes);
  take(hn::Vec<ClipTag>{_mm256_castsi256_ps(all)}, 0);
}

#else

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
using ClipTag = hn::FixedTag<float, 8>;
#else
using ClipTag = hn::FixedTag<float, 4>;
#endif
constexpr size_t kBurstsAtOnce = 1;
using ClipLanes = FloatClip;
constexpr size_t kClipLanes = hn::MaxLanes(ClipTag());

using ClipBytes = hn::Repartition<uint8_t, ClipTag>;

// 16 bytes for the first four lanes, and 16 for the second four if there are eight lanes.
template <class D8>
HWY_INLINE hn::Vec<D8> load_rows(D8 d8, const uint8_t* row0, const uint8_t* row1) {
  if constexpr (hn::MaxLanes(D8()) == 32) {
    const hn::Half<D8> half;
    return hn::Combine(d8, hn::LoadU(half, row1), hn::LoadU(half, row0));
  } else {
    return hn::LoadU(d8, row0);
  }
}

// Stores the rows of load_rows; the second row may overwrite the end of the first.
template <class D8>
HWY_INLINE void store_rows(D8 d8, hn::Vec<D8> rows, uint8_t* row0, uint8_t* row1) {
  if constexpr (hn::MaxLanes(D8()) == 32) {
    const hn::Half<D8> half;
    hn::StoreU(hn::LowerHalf(half, rows), half, row0);
    hn::StoreU(hn::UpperHalf(half, rows), half, row1);
  } else {
    hn::StoreU(rows, d8, row0);
  }
}

// Writes the codes of kClipLanes values, 16 bytes for each four values, and their tags to `tags`.
// Returns the size of the codes.
HWY_INLINE size_t encode_lanes(const float* x, const FloatClip& clip, uint8_t* tags, uint8_t* out) {
  const ClipTag d;
  const hn::RebindToSigned<ClipTag> di32;
  const ClipBytes d8;
  const hn::Rebind<int16_t, ClipTag> d16;
  const hn::Repartition<uint8_t, decltype(d16)> d8_of_tags;
  const auto set = [&](uint32_t v) HWY_ATTR { return hn::Set(di32, static_cast<int32_t>(v)); };
  const auto bits = hn::BitCast(di32, hn::LoadU(d, x));
  const auto magnitude = hn::And(bits, set(0x7fffffffu));
  const auto shifted =
      hn::ConvertTo(di32, hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 1.0f / kFixedUnit)));
  const auto below_kept = hn::VecFromMask(di32, hn::Gt(set(clip.smallest), magnitude));
  const auto cuts = hn::VecFromMask(di32, hn::Gt(hn::And(shifted, set(clip.cut)), hn::Zero(di32)));
  const auto wide = hn::Or(hn::VecFromMask(di32, hn::Gt(magnitude, set(clip.wide - 1))), cuts);
  const auto is_whole = hn::Gt(magnitude, set(kOneBits - 1));
  const auto sign = hn::And(hn::ShiftRight<8>(bits), set(kFixedSign));
  const auto codes = hn::IfThenElse(is_whole, bits, hn::Or(shifted, sign));
  // Each of a tag's two bits becomes a byte of ones or zeros.
  const auto odd = hn::Xor(hn::Not(below_kept), hn::Xor(wide, hn::VecFromMask(di32, is_whole)));
  const auto tag_bytes =
      hn::DemoteTo(d16, hn::Or(hn::And(odd, set(0xffu)), hn::And(wide, set(0xffffff00u))));
  const uint64_t lane_tags =
      bits_of_mask(d8_of_tags, hn::MaskFromVec(hn::BitCast(d8_of_tags, tag_bytes)));
  const size_t first = lane_tags & 255;
  const size_t second = lane_tags >> 8;
  const auto packed = hn::TableLookupBytes(
      hn::BitCast(d8, codes), load_rows(d8, kClipTable.pack[first], kClipTable.pack[second]));
  tags[0] = static_cast<uint8_t>(first);
  if (kClipLanes == 8) tags[1] = static_cast<uint8_t>(second);
  const size_t size = kClipTable.size[first];
  store_rows(d8, packed, out, out + size);
  return kClipLanes == 8 ? size + kClipTable.size[second] : size;
}

HWY_INLINE size_t encode_bursts(const float* x, const FloatClip& clip, uint8_t* out) {
  size_t size = kBurstTagBytes;
  for (size_t i = 0; i < kBurstValues; i += kClipLanes) {
    size += encode_lanes(x + i, clip, out + i / 4, out + size);
  }
  return size;
}

// kClipLanes values from their tags (four in each argument) and codes.
HWY_INLINE hn::Vec<ClipTag> decode_lanes(size_t tags0, size_t tags1, const uint8_t* codes0,
                                         const uint8_t* codes1) {
  const ClipTag d;
  const hn::RebindToSigned<ClipTag> di32;
  const ClipBytes d8;
  const auto rows = load_rows(d8, kClipTable.unpack[tags0], kClipTable.unpack[tags1]);
  const auto codes =
      hn::BitCast(di32, hn::TableLookupBytesOr0(load_rows(d8, codes0, codes1), rows));
  const auto magnitude = hn::And(codes, hn::Set(di32, kFixedSign - 1));
  const auto value = hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, kFixedUnit));
  const auto sign = hn::BitCast(
      d, hn::And(hn::ShiftLeft<8>(codes), hn::Set(di32, static_cast<int32_t>(0x80000000u))));
  // Rows have the top bit set in bytes that were not sent. The highest byte is sent with tag 3
  // only.
  const auto narrow =
      hn::MaskFromVec(hn::BitCast(d, hn::BroadcastSignBit(hn::BitCast(di32, rows))));
  return hn::IfThenElse(narrow, hn::Or(value, sign), hn::BitCast(d, codes));
}

template <typename Take>
HWY_INLINE void decode_full_burst(const uint8_t* burst, const Take& take) {
  const uint8_t* codes = burst + kBurstTagBytes;
  const uint8_t* second = codes + kClipTable.size[burst[0]];
  if constexpr (kClipLanes == 8) {
    take(decode_lanes(burst[0], burst[1], codes, second), 0);
  } else {
    take(decode_lanes(burst[0], 0, codes, codes), 0);
    take(decode_lanes(burst[1], 0, second, second), 4);
  }
}

#endif

// Number of bytes whose burst sizes are found together.
constexpr size_t kStepBytes = 2048;

size_t float_clip_encode(const float* x, size_t n, const FloatClip& clip, uint8_t* out) {
  constexpr size_t kStep = kBurstsAtOnce * kBurstValues;
  const ClipLanes lanes(clip);
  uint8_t* to = out;
  size_t i = 0;
  for (; i + kStep <= n; i += kStep) to += encode_bursts(x + i, lanes, to);
  return static_cast<size_t>(to - out) + scalar::float_clip_encode(x + i, n - i, clip, to);
}

// steps[i] = the size of a burst that begins at bytes[i], for i < count. Returns count, at most
// kStepBytes: as many as whole vectors give without reading after `bytes + room`.
//
// Where a burst begins is known only after the tags before it have been read, and that chain of
// reads would take longer than all other work. So the sizes are computed for every place where a
// burst might begin; the chain is then one look-up for each burst.
HWY_INLINE size_t find_steps(const uint8_t* bytes, size_t room, uint8_t* steps) {
  const hn::ScalableTag<uint8_t> d8;
  const size_t lanes = hn::Lanes(d8);
  // Sizes of the codes of two tags.
  alignas(16) static constexpr uint8_t kSizes[16] = {0, 1, 2, 4, 1, 2, 3, 5,
                                                     2, 3, 4, 6, 4, 5, 6, 8};
  const auto sizes = hn::LoadDup128(d8, kSizes);
  const auto size_of_tags = [&](hn::Vec<decltype(d8)> tags) HWY_ATTR {
    return hn::Add(hn::TableLookupBytes(sizes, hn::And(tags, hn::Set(d8, 15))),
                   hn::TableLookupBytes(sizes, hn::ShiftRight<4>(tags)));
  };
  size_t i = 0;
  for (; i + lanes <= kStepBytes && i + lanes < room; i += lanes) {
    const auto size =
        hn::Add(size_of_tags(hn::LoadU(d8, bytes + i)), size_of_tags(hn::LoadU(d8, bytes + i + 1)));
    hn::StoreU(hn::Add(size, hn::Set(d8, kBurstTagBytes)), d8, steps + i);
  }
  return i;
}

template <class Output>
HWY_INLINE bool decode_bursts(const uint8_t* bursts, size_t size, size_t n, DecodeMode mode,
                              Output out) {
  uint8_t steps[kStepBytes];
  size_t at = 0;
  size_t i = 0;
  while (i + kBurstValues <= n && at + kMaxBurstSize <= size) {
    const uint8_t* from = bursts + at;
    const size_t known = find_steps(from, size - at, steps);
    const size_t end = HWY_MIN(known, size - at - kMaxBurstSize + 1);
    if (end == 0) break;
    size_t step = 0;
    for (; step < end && i + kBurstValues <= n; i += kBurstValues) {
      decode_full_burst(from + step, [&](hn::Vec<ClipTag> v, size_t lane)
                                         HWY_ATTR { out.put(ClipTag(), v, i + lane); });
      step += steps[step];
    }
    at += step;
  }
  return scalar::float_clip_decode(bursts + at, size - at, n - i, out.out + i, mode);
}

bool float_clip_decode(const uint8_t* bursts, size_t size, size_t n, float* out, DecodeMode mode) {
  return with_output(out, mode,
                     [=](auto to) HWY_ATTR { return decode_bursts(bursts, size, n, mode, to); });
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
