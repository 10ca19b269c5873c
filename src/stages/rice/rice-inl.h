// The rice coder, for one SIMD target. Contracts: stages/kernels.def; format:
// stages/rice/rice.h.
//
// Vectors find the best k. The rest is a chain from code to code through a 64-bit buffer, in scalar
// instructions; the target's shifts and bit counts make them faster.

#include <algorithm>
#include <bit>
#include <cstring>

#include "hwy/highway.h"

#include "stages/element/float_bits.h"
#include "stages/element/load-inl.h"
#include "stages/rice/rice.h"
#include "stages/ternary/ternary-inl.h"
#include "stages/trits/trit.h"
#include "stages/trits/trit_bits.h"
#include "stages/zero_run/unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// A group of non-zeros on the way to its codes.
struct RiceGroup {
  alignas(64) uint32_t gaps[kRiceGroup];
  // A code is `zeros` zeros, then `rest`; length is that of both.
  alignas(64) uint32_t rest[kRiceGroup];
  alignas(64) uint32_t zeros[kRiceGroup];
  alignas(64) uint32_t length[kRiceGroup];
};

// The k that takes the fewest bits; the smallest of several. A lane for each k.
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

// Bits that wait to be written, the first the lowest; fewer than 8 between calls.
struct RiceWriter {
  uint8_t* out;
  uint64_t bits = 0;
  uint32_t held = 0;

  // At most 56 bits from one flush to the next.
  HWY_INLINE void put(uint32_t zeros, uint64_t rest, uint32_t length) {
    bits |= rest << (held + zeros);
    held += length;
  }
  HWY_INLINE void flush() {
    std::memcpy(out, &bits, sizeof bits);
    out += held >> 3;
    bits >>= held & ~7u;
    held &= 7;
  }
};

// Codes `count` non-zeros: marks[1] to marks[count], 2 * (position + 1) + sign each. marks[0] is
// the non-zero before them, or 0. Reads kRiceGroup + 1 of them.
HWY_INLINE void write_group(const uint32_t* marks, size_t count, RiceWriter& writer) {
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

// Marks that may be written after those of a word.
constexpr size_t kMarkSlack = 16;

// Appends the marks of a word's non-zeros; `first` is the mark that its first value would have.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL

struct TwiceNumbers {
  alignas(64) uint8_t of[64] = {};
  constexpr TwiceNumbers() {
    for (int i = 0; i < 64; ++i) of[i] = static_cast<uint8_t>(2 * i);
  }
};
inline constexpr TwiceNumbers kTwiceNumbers;

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

#else

HWY_INLINE size_t append_marks(uint64_t any, uint64_t negative, uint32_t first, uint32_t* marks) {
  const auto count = static_cast<size_t>(std::popcount(any));
  for (size_t i = 0; i < count; i += 4) {
    for (size_t j = 0; j < 4; ++j) {
      const int bit = __builtin_ctzll(any | uint64_t{1} << 63);
      marks[i + j] =
          first + static_cast<uint32_t>(bit) * 2 + static_cast<uint32_t>(negative >> bit & 1);
      any &= any - 1;
    }
  }
  return count;
}

#endif

size_t rice_encode(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* out) {
  const size_t most = packed_size(n);
  // When the code has nearly reached packed_size(n), a word may still add two groups, and then
  // comes the last group.
  uint8_t coded[kMaxRunInput + 3 * (kRiceLongestGroup / 8 + 1) + sizeof(uint64_t)];
  RiceWriter writer{coded};
  const auto size = [&] {
    return static_cast<size_t>(writer.out - coded) + (writer.held != 0 ? 1 : 0);
  };
  // The mark of the non-zero before the waiting group, the marks of that group, and those of a
  // word.
  uint32_t marks[1 + kRiceGroup + kWordBits + kMarkSlack] = {};
  size_t count = 0;
  const size_t words = trit_words(n);
  for (size_t word = 0; word < words && size() < most; ++word) {
    count += append_marks(plus[word] | minus[word], minus[word],
                          static_cast<uint32_t>(2 * (word * kWordBits + 1)), marks + 1 + count);
    while (count >= kRiceGroup) {
      write_group(marks, kRiceGroup, writer);
      count -= kRiceGroup;
      std::memmove(marks, marks + kRiceGroup, (1 + count) * sizeof *marks);
    }
  }
  if (count != 0) write_group(marks, count, writer);
  if (size() >= most) {
    pack_trit_bits(plus, minus, n, out);
    return most;
  }
  std::memcpy(out, coded, size());
  return size();
}

// Bits that were loaded but not yet read, the first the lowest. The bits above `held` are those at
// `next`, or 0.
struct RiceReader {
  const uint8_t* next;
  const uint8_t* end;
  uint64_t bits = 0;
  int held = 0;

  [[nodiscard]] HWY_INLINE bool has_word() const { return end - next >= 8; }

  // Afterwards 56 bits or more are held. Needs has_word().
  HWY_INLINE void fill() {
    uint64_t word;
    std::memcpy(&word, next, sizeof word);
    bits |= word << held;
    next += (63 - held) >> 3;
    held |= 56;
  }
  // Afterwards 56 bits or more are held, or all that are left.
  HWY_INLINE void fill_to_end() {
    for (; held < 56 && next != end; held += 8) bits |= static_cast<uint64_t>(*next++) << held;
  }
  HWY_INLINE void drop(int length) {
    bits >>= length;
    held -= length;
  }
  // Only padding is left; after fill_to_end.
  [[nodiscard]] HWY_INLINE bool ended() const { return held < kRicePadding && bits == 0; }

  // Reads a code: returns the zeros before the next non-zero, and its sign. If held < 0 afterwards,
  // the code was cut off.
  HWY_INLINE size_t take(int k, uint64_t remainder_mask, uint32_t& sign) {
    const int zeros = std::countr_zero(bits | uint64_t{1} << kRiceEscape);
    if (HWY_UNLIKELY(zeros == kRiceEscape)) {
      const uint64_t rest = bits >> kRiceEscape;
      drop(kRiceLongestCode);
      sign = static_cast<uint32_t>(rest & 1);
      return rest >> 1 & 0xffff;
    }
    const uint64_t rest = bits >> (zeros + 1);
    drop(zeros + k + 2);
    sign = static_cast<uint32_t>(rest & 1);
    return (static_cast<size_t>(zeros) << k) + (rest >> 1 & remainder_mask);
  }
};

// Calls put(position, sign) for each non-zero; false, after a part of the calls, for bytes that
// hold something else.
template <typename Put>
HWY_INLINE bool for_each_rice_code(const uint8_t* bytes, size_t size, size_t n, Put put) {
  RiceReader reader{bytes, bytes + size};
  size_t at = 0;
  for (;;) {
    reader.fill_to_end();
    if (reader.ended()) return true;
    const int k = static_cast<int>(reader.bits & (kRiceChoices - 1));
    const uint64_t mask = (uint64_t{1} << k) - 1;
    reader.drop(kRiceHeadBits);
    uint32_t sign = 0;
    for (int left = kRiceGroup; left > 0;) {
      if (left >= 2 && reader.has_word()) {
        reader.fill();
        size_t i = at + reader.take(k, mask, sign);
        if (i >= n) return false;
        put(i, sign);
        i += 1 + reader.take(k, mask, sign);
        if (i >= n) return false;
        put(i, sign);
        at = i + 1;
        left -= 2;
        continue;
      }
      reader.fill_to_end();
      if (left < kRiceGroup && reader.ended()) return true;
      const size_t i = at + reader.take(k, mask, sign);
      if (reader.held < 0 || i >= n) return false;
      put(i, sign);
      at = i + 1;
      --left;
    }
  }
}

bool rice_decode(const uint8_t* bytes, size_t size, size_t n, uint64_t* plus, uint64_t* minus) {
  std::fill_n(plus, trit_words(n), 0);
  std::fill_n(minus, trit_words(n), 0);
  if (size == packed_size(n)) return unpack_trit_bits(bytes, n, plus, minus);
  if (size > packed_size(n)) return false;
  return for_each_rice_code(bytes, size, n, [=](size_t i, uint32_t sign) HWY_ATTR {
    set_trit(plus, minus, i, sign == 0 ? 1 : -1);
  });
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
