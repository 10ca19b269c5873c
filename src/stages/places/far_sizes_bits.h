#pragma once

// Writes and reads the sizes of far steps, at least 2 (spec/format.md, Delta). Kernels of every
// target use these functions, so all of them are inlined and compiled for the target.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/base.h"

#include "base/varint.h"
#include "stages/places/places.h"
#include "stages/rice/rice_bits.h"

namespace gradwire {

inline constexpr int kLargestSizeOrder = 15;
inline constexpr uint32_t kSmallestFar = 2;

// The most bytes that write_far_sizes writes, with those that it may write after the last.
constexpr size_t far_sizes_room(size_t count) { return count * sizeof(uint64_t) + 64; }

// Exp-Golomb code of order k: v = size - 2 + 2^k has some zeros fewer than its bits, then a 1, then
// the bits of v without its highest.
struct SizeCode {
  uint64_t v;
  int zeros;
  int low_bits;

  HWY_INLINE SizeCode(uint32_t size, int k)
      : v(size - kSmallestFar + (uint64_t{1} << k)),
        zeros(static_cast<int>(std::bit_width(v)) - 1 - k),
        low_bits(static_cast<int>(std::bit_width(v)) - 1) {}
  [[nodiscard]] HWY_INLINE int length() const { return zeros + 1 + low_bits; }
};

// The order that would be the best if each size less 2 were a power of two or 0, the first of
// equal ones.
HWY_INLINE int choose_size_order(const uint32_t* sizes, size_t count) {
  constexpr int kWidths = 33;
  // Neighbours are mostly equal; they count in different places.
  uint32_t counts[4][kWidths] = {};
  for (size_t i = 0; i < count; ++i) ++counts[i % 4][std::bit_width(sizes[i] - kSmallestFar)];
  int best = 0;
  uint64_t fewest = UINT64_MAX;
  for (int k = 0; k <= kLargestSizeOrder; ++k) {
    uint64_t bits = 0;
    for (int width = 0; width < kWidths; ++width) {
      const uint64_t those =
          uint64_t{counts[0][width]} + counts[1][width] + counts[2][width] + counts[3][width];
      bits += those * static_cast<uint64_t>(width <= k ? k + 1 : 2 * width - 1 - k);
    }
    if (bits < fewest) best = k, fewest = bits;
  }
  return best;
}

HWY_INLINE uint8_t* write_size_string(const uint32_t* sizes, size_t count, int k, uint8_t* out) {
  RiceWriter writer{out};
  for (size_t i = 0; i < count; ++i) {
    const SizeCode code(sizes[i], k);
    const uint64_t low = code.v & ((uint64_t{1} << code.low_bits) - 1);
    const auto zeros = static_cast<uint32_t>(code.zeros);
    const auto length = static_cast<uint32_t>(code.length());
    if (HWY_LIKELY(length <= kMostBetweenFlushes)) {
      writer.put(zeros, low << 1 | 1, length);
    } else {
      writer.put(zeros, 1, zeros + 1);
      writer.flush();
      writer.put(0, low, length - zeros - 1);
    }
    writer.flush();
  }
  return writer.out + (writer.held != 0 ? 1 : 0);
}

// One string on its way to sizes.
struct SizeReader {
  RiceReader reader;
  int k;
  uint64_t largest = 0;  // of the sizes; beyond 32 bits for a code that is not valid

  HWY_INLINE void fill() {
    if (reader.has_word()) {
      reader.fill();
    } else {
      reader.fill_to_end();
    }
  }
  // Needs a fill.
  HWY_INLINE uint32_t take() {
    const int zeros = std::countr_zero(reader.bits | uint64_t{1} << 31);
    const int low_bits = zeros + k;
    reader.drop(zeros + 1);
    if (HWY_UNLIKELY(reader.held < low_bits)) fill();
    const uint64_t bit = uint64_t{1} << low_bits;
    const uint64_t size = (reader.bits & (bit - 1)) + bit - (uint64_t{1} << k) + kSmallestFar;
    reader.drop(low_bits);
    largest = std::max(largest, size);
    return static_cast<uint32_t>(size);
  }
  // Reads what is left; returns whether the string ends then.
  HWY_INLINE bool finish(uint32_t* sizes, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      fill();
      sizes[i] = take();
      if (reader.held < 0) return false;
    }
    reader.fill_to_end();
    return reader.ended() && reader.next == reader.end;
  }
};

constexpr size_t sizes_in_string(size_t count, size_t strings) {
  return (count + strings - 1) / strings;
}

// Kernels::write_far_sizes.
HWY_INLINE size_t write_size_strings(const uint32_t* sizes, size_t count, uint8_t* out) {
  const uint8_t* first = out;
  const int k = choose_size_order(sizes, count);
  const size_t strings = place_runs(count);
  const size_t most = sizes_in_string(count, strings);
  *out++ = static_cast<uint8_t>(k);
  uint8_t* begin = out + (strings - 1) * kLongestVarint;
  uint8_t* at = begin;
  for (size_t i = 0; i < strings; ++i) {
    uint8_t* end = write_size_string(sizes + i * most, std::min(most, count - i * most), k, at);
    if (i + 1 < strings) out = write_varint(static_cast<uint32_t>(end - at), out);
    at = end;
  }
  std::memmove(out, begin, static_cast<size_t>(at - begin));
  return static_cast<size_t>(out + (at - begin) - first);
}

// Kernels::read_far_sizes.
HWY_INLINE bool read_size_strings(const uint8_t* bytes, size_t size, uint32_t largest,
                                  uint32_t* sizes, size_t count) {
  const uint8_t* at = bytes;
  const uint8_t* end = at + size;
  if (at == end || *at > kLargestSizeOrder) return false;
  const int k = *at++;
  const size_t strings = place_runs(count);
  const size_t most = sizes_in_string(count, strings);
  size_t lengths[kPlaceRuns] = {};
  for (size_t i = 0; i + 1 < strings; ++i) {
    const auto length = read_varint(at, end);
    if (!length) return false;
    lengths[i] = *length;
  }
  SizeReader readers[kPlaceRuns];
  for (size_t i = 0; i < strings; ++i) {
    const auto left = static_cast<size_t>(end - at);
    const size_t length = i + 1 < strings ? lengths[i] : left;
    if (length > left) return false;
    readers[i] = {{at, at + length}, k};
    at += length;
  }
  size_t done = 0;
  if (strings == kPlaceRuns) {
    SizeReader a = readers[0];
    SizeReader b = readers[1];
    SizeReader c = readers[2];
    SizeReader d = readers[3];
    const size_t shortest = count - 3 * most;
    for (; done < shortest && a.reader.has_word() && b.reader.has_word() && c.reader.has_word() &&
           d.reader.has_word();
         ++done) {
      a.reader.fill();
      b.reader.fill();
      c.reader.fill();
      d.reader.fill();
      sizes[done] = a.take();
      sizes[done + most] = b.take();
      sizes[done + 2 * most] = c.take();
      sizes[done + 3 * most] = d.take();
    }
    readers[0] = a;
    readers[1] = b;
    readers[2] = c;
    readers[3] = d;
  }
  for (size_t i = 0; i < strings; ++i) {
    const size_t first = i * most + done;
    SizeReader& reader = readers[i];
    if (!reader.finish(sizes + first, std::min((i + 1) * most, count) - first)) return false;
    if (reader.largest > largest) return false;
  }
  return true;
}

}  // namespace gradwire
