#pragma once

// Writes and reads rice codes through a buffer of 64 bits. Kernels of every target use these
// functions, so all of them are inlined and compiled for the target.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/base.h"

#include "stages/rice/rice.h"
#include "stages/trits/trit_bits.h"

namespace gradwire {

inline constexpr uint32_t kMostBetweenFlushes = 56;

// Bits that wait to be written, the first the lowest; fewer than 8 after a flush.
struct RiceWriter {
  uint8_t* out;
  uint64_t bits = 0;
  uint32_t held = 0;

  // At most kMostBetweenFlushes bits from one flush to the next.
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

// Number of marks that append_marks may write after the marks of a word.
inline constexpr size_t kMarkSlack = 16;

// Appends the marks of a word's non-zeros, 2 * place + sign (1 for -1), and returns their number.
// `first` is the mark that the word's first value would have if it were +1.
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

// Kernels::rice_encode. append: as append_marks; places begin with 1 here. write(marks, count,
// writer) codes the non-zeros marks[1] to marks[count]; marks[0] is the non-zero before them, or 0.
template <typename AppendMarks, typename WriteGroup>
HWY_INLINE size_t encode_rice(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* out,
                              const AppendMarks& append, const WriteGroup& write) {
  const size_t most = packed_size(n);
  // When the code has nearly reached packed_size(n), a word may still add two groups, and the last
  // group follows.
  uint8_t coded[packed_size(kMostRiceTrits) + 3 * (kRiceLongestGroup / 8 + 1) + sizeof(uint64_t)];
  RiceWriter writer{coded};
  const auto size = [&] {
    return static_cast<size_t>(writer.out - coded) + (writer.held != 0 ? 1 : 0);
  };
  // The mark of the non-zero before the waiting group, the marks of that group, and the marks of a
  // word.
  uint32_t marks[1 + kRiceGroup + kWordBits + kMarkSlack] = {};
  size_t count = 0;
  const size_t words = trit_words(n);
  for (size_t word = 0; word < words && size() < most; ++word) {
    count += append(plus[word] | minus[word], minus[word],
                    static_cast<uint32_t>(2 * (word * kWordBits + 1)), marks + 1 + count);
    while (count >= kRiceGroup) {
      write(marks, kRiceGroup, writer);
      count -= kRiceGroup;
      std::memmove(marks, marks + kRiceGroup, (1 + count) * sizeof *marks);
    }
  }
  if (count != 0) write(marks, count, writer);
  if (size() >= most) {
    pack_trit_bits(plus, minus, n, out);
    return most;
  }
  std::memcpy(out, coded, size());
  return size();
}

// Bits that were loaded but not yet read, the first the lowest. Above the `held` bits there are the
// bits at `next`, or zeros.
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
  // Whether only padding is left. Call fill_to_end before.
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
  // The same for a code without a sign.
  HWY_INLINE size_t take_gap(int k, uint64_t remainder_mask) {
    const int zeros = std::countr_zero(bits | uint64_t{1} << kRiceEscape);
    const uint64_t rest = bits >> zeros >> 1;
    if (HWY_UNLIKELY(zeros == kRiceEscape)) {
      const size_t gap = bits >> kRiceEscape & 0xffff;
      drop(kRiceLongestCode - 1);
      return gap;
    }
    bits = rest >> k;
    held -= zeros + k + 1;
    return (static_cast<size_t>(zeros) << k) + (rest & remainder_mask);
  }
};

// Calls put(position, sign) for each non-zero; returns false, after some of the calls, if the bytes
// are not valid.
template <typename Put>
HWY_INLINE bool for_each_rice_code(const uint8_t* bytes, size_t size, size_t n, const Put& put) {
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

// Kernels::rice_decode.
HWY_INLINE bool decode_rice(const uint8_t* bytes, size_t size, size_t n, uint64_t* plus,
                            uint64_t* minus) {
  std::fill_n(plus, trit_words(n), 0);
  std::fill_n(minus, trit_words(n), 0);
  if (size == packed_size(n)) return unpack_trit_bits(bytes, n, plus, minus);
  return size < packed_size(n) && for_each_rice_code(bytes, size, n, [=](size_t i, uint32_t sign) {
           set_trit(plus, minus, i, sign == 0 ? 1 : -1);
         });
}

}  // namespace gradwire
