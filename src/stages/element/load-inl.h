// Loads, stores and masks that Highway has no function for, for one SIMD target.

#if defined(GRADWIRE_STAGES_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_LOAD_INL_H_
#undef GRADWIRE_STAGES_LOAD_INL_H_
#else
#define GRADWIRE_STAGES_LOAD_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"

#include "stages/element/kept_places.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// Vectors of packed bytes, for packing and zero-run coding.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
using PackedTag = hn::FixedTag<uint8_t, 64>;
#else
using PackedTag = hn::FixedTag<uint8_t, 16>;
#endif
using PackedVec = hn::Vec<PackedTag>;
constexpr size_t kPackedLanes = hn::MaxLanes(PackedTag());

constexpr size_t kPageBytes = 4096;
constexpr size_t kPageValues = kPageBytes / sizeof(float);
[[maybe_unused]] constexpr size_t kFetchedBytes = 512;

// Prefetches the first lines of the page that begins about kPageBytes after `from`, because the
// hardware's prefetch stops at each page of 4 KiB. While one page is read from memory, the next one
// comes into L2: up to 1.4 times the speed on Zen 4, and no loss in cache. On Zen 3, which has no
// AVX-512, 3lc without these prefetches was up to 9 % faster. This is a hint, not an access, so the
// page may lie outside the span. The function must be inlined: g++ drops calls of functions that
// only prefetch.
HWY_INLINE void fetch_ahead([[maybe_unused]] const void* from) {
#if !HWY_ARCH_X86 || HWY_TARGET <= HWY_AVX3
  const uintptr_t page =
      (reinterpret_cast<uintptr_t>(from) + kPageBytes + kPageBytes / 2) / kPageBytes * kPageBytes;
  for (size_t i = 0; i < kFetchedBytes; i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(page + i), 0, 2);
  }
#endif
}

// Prefetches n values into L2 that begin `distance` values after `from`; they may lie outside the
// span, too.
template <typename T>
HWY_INLINE void fetch_values(const T* from, size_t distance, size_t n) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(from) + distance * sizeof(T);
  HWY_UNROLL(20)
  for (size_t i = 0; i < n * sizeof(T); i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(first + i), 0, 2);
  }
}

// Loads as many floats or bfloat16 as d has lanes; returns floats.
template <class D>
HWY_INLINE hn::Vec<D> load_widened(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load_widened(D d, const uint16_t* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
}

// The upper half of each lane is narrow_bf16 of that lane of v, whose NaNs are all 0x7fc00000 or
// 0xffc00000.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> round_to_bf16(D, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  return hn::Add(hn::Add(bits, hn::Set(d32, 0x7fff)), odd);
}

// v with each NaN replaced by 0x7fc00000 with the same sign.
template <class D>
HWY_INLINE hn::Vec<D> replace_nans(D d, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> d32;
  const auto nan = hn::BitCast(d, hn::Set(d32, 0x7fc00000u));
  return hn::IfThenElse(hn::IsNaN(v), hn::CopySignToAbs(nan, v), v);
}

// Each lane narrowed by narrow_bf16.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> narrow_to_bf16(D d, hn::Vec<D> v) {
  const hn::RebindToSigned<D> di32;
  const hn::Rebind<uint16_t, D> d16;
  const auto upper = hn::ShiftRight<16>(round_to_bf16(d, replace_nans(d, v)));
  return hn::DemoteTo(d16, hn::BitCast(di32, upper));
}

// The same for two vectors. This is faster than narrowing one by one: NaNs are rare, so one check
// serves both.
template <class D>
HWY_INLINE hn::Vec<hn::Repartition<uint16_t, D>> narrow_to_bf16(D d, hn::Vec<D> first,
                                                                hn::Vec<D> second) {
  const hn::Repartition<uint16_t, D> d16;
  // The sum is NaN where either value is; it may also be NaN where both are infinite.
  if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(hn::Add(first, second))))) {
    first = replace_nans(d, first);
    second = replace_nans(d, second);
  }
  return hn::ConcatOdd(d16, hn::BitCast(d16, round_to_bf16(d, second)),
                       hn::BitCast(d16, round_to_bf16(d, first)));
}

// bfloat16 in lanes of D16, with the largest in place of an infinity.
template <class D16>
HWY_INLINE hn::Vec<D16> make_finite(D16 d16, hn::Vec<D16> v) {
  const auto magnitude = hn::And(v, hn::Set(d16, 0x7fff));
  const auto infinite = hn::Eq(magnitude, hn::Set(d16, kInfiniteBf16));
  return hn::Add(v, hn::VecFromMask(d16, infinite));  // -1
}

// Stores each lane: as it is, or narrowed by narrow_bf16_finite.
template <class D>
HWY_INLINE void store_residual(D d, hn::Vec<D> v, float* to) {
  hn::StoreU(v, d, to);
}

template <class D>
HWY_INLINE void store_residual(D d, hn::Vec<D> v, uint16_t* to) {
  const hn::Rebind<uint16_t, D> d16;
  hn::StoreU(make_finite(d16, narrow_to_bf16(d, v)), d16, to);
}

// The same for two vectors.
template <class D>
HWY_INLINE void store_residual(D d, hn::Vec<D> first, hn::Vec<D> second, float* to) {
  hn::StoreU(first, d, to);
  hn::StoreU(second, d, to + hn::Lanes(d));
}

template <class D>
HWY_INLINE void store_residual(D d, hn::Vec<D> first, hn::Vec<D> second, uint16_t* to) {
  const hn::Repartition<uint16_t, D> d16;
  hn::StoreU(make_finite(d16, narrow_to_bf16(d, first, second)), d16, to);
}

// One bit for each lane of a mask, the first lane lowest; at most 64 lanes.
template <class D>
HWY_INLINE uint64_t bits_of_mask(D d, hn::Mask<D> mask) {
  uint8_t bytes[8] = {};
  hn::StoreMaskBits(d, mask, bytes);
  uint64_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  return bits;
}

// The mask of the lowest bits, one for each lane.
template <class D>
HWY_INLINE hn::Mask<D> mask_of_bits(D d, uint64_t bits) {
  uint8_t bytes[8];
  std::memcpy(bytes, &bits, sizeof bits);
  return hn::LoadMaskBits(d, bytes);
}

// Stores the bits of mask(0), mask(lanes), ... of as many masks as cover n lanes. n is a multiple
// of 8 and of the lanes.
template <class D, class Mask>
HWY_INLINE void store_mask_bits(D d, size_t n, uint8_t* bits, const Mask& mask) {
  const size_t lanes = hn::Lanes(d);
  if (lanes >= 8) {
    for (size_t i = 0; i < n; i += lanes) hn::StoreMaskBits(d, mask(i), bits + i / 8);
  } else {
    for (size_t i = 0; i < n; i += 8) {
      const uint64_t lower = bits_of_mask(d, mask(i));
      bits[i / 8] = static_cast<uint8_t>(lower | bits_of_mask(d, mask(i + 4)) << 4);
    }
  }
}

// Appends the bytes of v whose bit in `keep` is set to a list. Up to 16 bytes are written.
template <class D8>
HWY_INLINE void store_kept(D8 d8, hn::Vec<D8> v, size_t keep, uint8_t* list, size_t& count) {
  const hn::Half<D8> half;
  const auto lower = hn::ZeroExtendVector(d8, hn::LoadU(half, kKept.places[keep & 255]));
  const auto upper = hn::ZeroExtendVector(d8, hn::LoadU(half, kKept.places[keep >> 8 & 255]));
  hn::StoreU(hn::LowerHalf(half, hn::TableLookupBytes(v, lower)), half, list + count);
  count += hwy::PopCount(keep & 255);
  const auto from = hn::Add(upper, hn::Set(d8, 8));
  hn::StoreU(hn::LowerHalf(half, hn::TableLookupBytes(v, from)), half, list + count);
  count += hwy::PopCount(keep >> 8 & 255);
}

// The lanes whose mask is set, moved together. v has at most 8 lanes, or the target has an
// instruction for this. On other targets Highway 1.0's Compress copies its table to the stack with
// each call.
template <class D>
HWY_INLINE hn::Vec<D> compress_lanes(D d, hn::Vec<D> v, hn::Mask<D> mask) {
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3) || HWY_HAVE_SCALABLE
  (void)d;
  return hn::Compress(v, mask);
#else
  const hn::RebindToUnsigned<D> d32;
  const hn::Rebind<uint8_t, D> d8;
  const auto places = hn::PromoteTo(d32, hn::LoadU(d8, kKept.places[bits_of_mask(d, mask)]));
  return hn::TableLookupLanes(v, hn::IndicesFromVec(d, places));
#endif
}

// Appends the lanes of v whose bit in `keep` is set to a list. 8 lanes are written.
template <class V16>
HWY_INLINE void store_kept_16(V16 v, size_t keep, uint16_t* list, size_t& count) {
  const hn::Full128<uint16_t> d16;
  const hn::Full128<uint8_t> d8;
  const auto lanes = hn::PromoteTo(d16, hn::LoadU(hn::Half<decltype(d8)>(), kKept.places[keep]));
  // The bytes 2 * lane and 2 * lane + 1.
  const auto bytes = hn::Add(hn::Mul(lanes, hn::Set(d16, 0x0202)), hn::Set(d16, 0x0100));
  hn::StoreU(hn::BitCast(d16, hn::TableLookupBytes(hn::BitCast(d8, v), hn::BitCast(d8, bytes))),
             d16, list + count);
  count += hwy::PopCount(keep);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
