// The rice coder, for one SIMD target. Contracts: stages/kernels.def; format:
// stages/rice/rice.h.
//
// Vectors find the best k. The rest, stages/rice/rice_bits.h, is a chain from code to code through
// a 64-bit buffer, in scalar instructions; the target's shifts and bit counts make them faster.

#include <algorithm>
#include <bit>

#include "hwy/highway.h"

#include "stages/element/float_bits.h"
#include "stages/element/load-inl.h"
#include "stages/rice/rice_bits.h"
#include "stages/trits/trit.h"
#include "stages/zero_run/unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// A group of non-zeros on the way to its codes.
struct RiceGroup {
  alignas(64) uint32_t gaps[kRiceGroup];
  // A code is `zeros` zeros, then `rest`; `length` counts both.
  alignas(64) uint32_t rest[kRiceGroup];
  alignas(64) uint32_t zeros[kRiceGroup];
  alignas(64) uint32_t length[kRiceGroup];
};

// The k that takes the fewest bits, the smallest if several do. Each k has a lane.
HWY_INLINE uint32_t best_k(const uint32_t* gaps, size_t count) {
  struct Lanes {
    uint16_t factor[kRiceChoices] = {};  // gap * factor >> 16 is gap >> k; not for k = 0
    uint16_t is_zero[kRiceChoices] = {0xffff};
    uint16_t k[kRiceChoices] = {};
    constexpr Lanes() {
      for (int i = 0; i < kRiceChoices; ++i) {
        factor[i] = static_cast<uint16_t>(0x10000 >> i);
        k[i] = static_cast<uint16_t>(i);
      }
    }
  };
  static constexpr Lanes kLanes;
  const hn::CappedTag<uint16_t, kRiceChoices> d;
  const auto escape = hn::Set(d, kRiceEscape);
  uint16_t keys[kRiceChoices];  // 16 * length + k
  for (size_t first = 0; first < kRiceChoices; first += hn::Lanes(d)) {
    const auto factor = hn::LoadU(d, kLanes.factor + first);
    const auto is_zero = hn::LoadU(d, kLanes.is_zero + first);
    const auto k = hn::LoadU(d, kLanes.k + first);
    // An escaped code has 17 bits after its zeros, any other code k + 2.
    const auto escaped_more = hn::Sub(hn::Set(d, kRiceGapBits - 1), k);
    auto sum = hn::Zero(d);
    for (size_t i = 0; i < count; ++i) {
      const auto gap = hn::Set(d, static_cast<uint16_t>(gaps[i]));
      const auto quotient = hn::Or(hn::MulHigh(gap, factor), hn::And(gap, is_zero));
      const auto zeros = hn::Min(quotient, escape);
      const auto more = hn::IfThenElseZero(hn::Eq(zeros, escape), escaped_more);
      sum = hn::Add(sum, hn::Add(zeros, more));
    }
    const auto others =
        hn::Mul(hn::Add(k, hn::Set(d, 2)), hn::Set(d, static_cast<uint16_t>(count)));
    hn::StoreU(hn::Or(hn::ShiftLeft<4>(hn::Add(sum, others)), k), d, keys + first);
  }
  uint16_t best = keys[0];
  for (size_t i = 1; i < kRiceChoices; ++i) best = HWY_MIN(best, keys[i]);
  return best % kRiceChoices;
}

// Codes the non-zeros marks[1] to marks[count] (encode_rice). Reads kRiceGroup + 1 marks.
void write_group(const uint32_t* marks, size_t count, RiceWriter& writer) {
  const hn::CappedTag<uint32_t, 16> d;
  RiceGroup group;
  const auto one = hn::Set(d, 1);
  for (size_t i = 0; i < kRiceGroup; i += hn::Lanes(d)) {
    const auto at = hn::ShiftRight<1>(hn::LoadU(d, marks + i + 1));
    const auto before = hn::ShiftRight<1>(hn::LoadU(d, marks + i));
    hn::Store(hn::Sub(hn::Sub(at, before), one), d, group.gaps + i);
  }
  const uint32_t k = best_k(group.gaps, count);
  const auto remainder_mask = hn::Set(d, (1u << k) - 1);
  const auto escape = hn::Set(d, kRiceEscape);
  for (size_t i = 0; i < kRiceGroup; i += hn::Lanes(d)) {
    const auto gap = hn::Load(d, group.gaps + i);
    const auto sign = hn::And(hn::LoadU(d, marks + i + 1), one);
    const auto zeros = hn::Min(hn::ShiftRightSame(gap, static_cast<int>(k)), escape);
    const auto escaped = hn::Eq(zeros, escape);
    const auto remainder = hn::And(gap, remainder_mask);
    const auto coded = hn::Or(hn::ShiftLeft<2>(remainder), hn::Or(hn::Add(sign, sign), one));
    const auto as_it_is = hn::Or(hn::ShiftLeft<1>(gap), sign);
    hn::Store(zeros, d, group.zeros + i);
    hn::Store(hn::IfThenElse(escaped, as_it_is, coded), d, group.rest + i);
    hn::Store(
        hn::IfThenElse(escaped, hn::Set(d, kRiceLongestCode), hn::Add(zeros, hn::Set(d, k + 2))), d,
        group.length + i);
  }
  writer.put(0, k, kRiceHeadBits);
  writer.flush();
  size_t i = 0;
  for (; i + 2 <= count; i += 2) {
    writer.put(group.zeros[i], group.rest[i], group.length[i]);
    writer.put(group.zeros[i + 1], group.rest[i + 1], group.length[i + 1]);
    writer.flush();
  }
  if (i == count) return;
  writer.put(group.zeros[i], group.rest[i], group.length[i]);
  writer.flush();
}

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL

struct TwiceNumbers {
  alignas(64) uint8_t of[64] = {};
  constexpr TwiceNumbers() {
    for (int i = 0; i < 64; ++i) of[i] = static_cast<uint8_t>(2 * i);
  }
};
inline constexpr TwiceNumbers kTwiceNumbers;

// The same as in stages/rice/rice_bits.h.
HWY_INLINE size_t append_marks(uint64_t any, uint64_t negative, uint32_t first, uint32_t* marks) {
  const __m512i even = _mm512_load_si512(kTwiceNumbers.of);
  const __m512i all = _mm512_mask_add_epi8(even, negative, even, _mm512_set1_epi8(1));
  const __m512i kept = _mm512_maskz_compress_epi8(any, all);
  const __m512i base = _mm512_set1_epi32(static_cast<int>(first));
  const auto count = static_cast<size_t>(std::popcount(any));
  const __m512i head = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(kept));
  _mm512_storeu_si512(marks, _mm512_add_epi32(base, head));
  if (HWY_LIKELY(count <= 16)) return count;
  alignas(64) uint8_t bytes[64];
  _mm512_store_si512(bytes, kept);
  for (size_t i = 16; i < count; i += 16) {
    const __m128i some = _mm_load_si128(reinterpret_cast<const __m128i*>(bytes + i));
    _mm512_storeu_si512(marks + i, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(some)));
  }
  return count;
}

#endif

size_t rice_encode(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* out) {
  return encode_rice(plus, minus, n, out, append_marks, write_group);
}

bool rice_decode(const uint8_t* bytes, size_t size, size_t n, uint64_t* plus, uint64_t* minus) {
  return decode_rice(bytes, size, n, plus, minus);
}

// Adds non-zeros to sums with a delay, so that the memory of each sum is prefetched well before it
// is needed.
class DelayedAdder {
 public:
  DelayedAdder(float m, float* out) : m_(bits_of(m)), out_(out) {}

  HWY_INLINE void put(size_t i, uint32_t sign) {
    __builtin_prefetch(out_ + i, 1);
    uint32_t& place = waiting_[count_ % kDelay];
    if (HWY_LIKELY(count_ >= kDelay)) add(place);
    place = static_cast<uint32_t>(i) << 1 | sign;
    ++count_;
  }
  HWY_INLINE void finish() {
    for (size_t i = HWY_MAX(count_, kDelay) - kDelay; i < count_; ++i) add(waiting_[i % kDelay]);
  }

 private:
  static constexpr size_t kDelay = 64;

  HWY_INLINE void add(uint32_t mark) { out_[mark >> 1] += float_of(m_ | mark << 31); }

  uint32_t m_;
  float* out_;
  size_t count_ = 0;
  uint32_t waiting_[kDelay];
};

bool rice_unpack(const uint8_t* bytes, size_t size, size_t n, float m, float* out,
                 DecodeMode mode) {
  if (size == packed_size(n)) return unpack(bytes, n, m, out, mode);
  if (size > packed_size(n)) return false;
  if (mode == DecodeMode::kStore) {
    std::fill_n(out, n, 0.0f);
    return for_each_rice_code(bytes, size, n, [=](size_t i, uint32_t sign) HWY_ATTR {
      out[i] = float_of(bits_of(m) | sign << 31);
    });
  }
  DelayedAdder adder(m, out);
  const bool valid = for_each_rice_code(
      bytes, size, n, [&](size_t i, uint32_t sign) HWY_ATTR { adder.put(i, sign); });
  if (valid) adder.finish();
  return valid;
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
