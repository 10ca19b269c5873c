#pragma once

// The scalar kernels of the rice coder. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "stages/element/output.h"
#include "stages/rice/rice.h"
#include "stages/trits/trits_scalar.h"
#include "stages/zero_run/zero_run.h"

namespace gradwire::scalar {

// Writes bits to `room` bytes, the first into the lowest bit. full: there were more of them.
struct RiceWriter {
  uint8_t* bytes;
  size_t room;
  size_t at = 0;

  void put(uint32_t bits, int length) {
    for (int i = 0; i < length; ++i, ++at) {
      if (full()) return;
      if (at % 8 == 0) bytes[at / 8] = 0;
      bytes[at / 8] = static_cast<uint8_t>(bytes[at / 8] | (bits >> i & 1) << at % 8);
    }
  }
  [[nodiscard]] size_t size() const { return (at + 7) / 8; }
  [[nodiscard]] bool full() const { return at == 8 * room; }
};

// The k that takes the fewest bits; the smallest of several.
inline int best_k(const uint32_t* gaps, int count) {
  int best = 0;
  int fewest = kRiceLongestGroup;
  for (int k = 0; k < kRiceChoices; ++k) {
    int length = 0;
    for (int i = 0; i < count; ++i) length += rice_length(gaps[i], k);
    if (length < fewest) best = k, fewest = length;
  }
  return best;
}

struct RiceReader {
  const uint8_t* bytes;
  size_t total;
  size_t at = 0;

  [[nodiscard]] uint32_t peek() const { return bytes[at / 8] >> at % 8 & 1; }
  [[nodiscard]] bool has(int length) const { return total - at >= static_cast<size_t>(length); }
  uint32_t take(int length) {
    uint32_t bits = 0;
    for (int i = 0; i < length; ++i, ++at) bits |= peek() << i;
    return bits;
  }
  // Only padding is left.
  [[nodiscard]] bool ended() const {
    RiceReader rest = *this;
    return !has(kRicePadding) && rest.take(static_cast<int>(total - at)) == 0;
  }
};

// Calls put(position, sign) for each non-zero; false, after a part of the calls, for bytes that
// hold something else.
template <typename Put>
bool for_each_rice_code(const uint8_t* bytes, size_t size, size_t n, Put put) {
  RiceReader reader{bytes, 8 * size};
  size_t next = 0;
  while (!reader.ended()) {
    if (!reader.has(kRiceHeadBits)) return false;
    const auto k = static_cast<int>(reader.take(kRiceHeadBits));
    for (int i = 0; i < kRiceGroup && (i == 0 || !reader.ended()); ++i) {
      int zeros = 0;
      while (zeros < kRiceEscape && reader.has(1) && reader.peek() == 0) reader.take(1), ++zeros;
      const bool escaped = zeros == kRiceEscape;
      const int rest = escaped ? kRiceGapBits : k;
      if (!reader.has(rest + (escaped ? 1 : 2))) return false;
      if (!escaped) reader.take(1);
      const uint32_t sign = reader.take(1);
      const size_t gap =
          (escaped ? 0 : static_cast<size_t>(zeros) << k) + size_t{reader.take(rest)};
      if (gap >= n - next) return false;
      put(next + gap, sign);
      next += gap + 1;
    }
  }
  return true;
}

inline size_t rice_encode(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* out) {
  uint8_t coded[kMaxRunInput];
  RiceWriter writer{coded, packed_size(n)};
  uint32_t gaps[kRiceGroup];
  uint32_t signs[kRiceGroup];
  int count = 0;
  const auto write_group = [&] {
    const int k = best_k(gaps, count);
    writer.put(static_cast<uint32_t>(k), kRiceHeadBits);
    for (int i = 0; i < count; ++i) {
      const RiceCode code = rice_code(gaps[i], signs[i], k);
      writer.put(code.bits, code.length);
    }
    count = 0;
  };
  size_t next = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t bit = uint64_t{1} << i % kWordBits;
    if (((plus[i / kWordBits] | minus[i / kWordBits]) & bit) == 0) continue;
    gaps[count] = static_cast<uint32_t>(i - next);
    signs[count++] = (minus[i / kWordBits] & bit) != 0 ? 1 : 0;
    next = i + 1;
    if (count == kRiceGroup) write_group();
  }
  if (count != 0) write_group();
  if (writer.size() < packed_size(n)) {
    std::memcpy(out, coded, writer.size());
    return writer.size();
  }
  pack_trit_bits(plus, minus, n, out);
  return packed_size(n);
}

inline bool rice_decode(const uint8_t* bytes, size_t size, size_t n, uint64_t* plus,
                        uint64_t* minus) {
  std::fill_n(plus, trit_words(n), 0);
  std::fill_n(minus, trit_words(n), 0);
  if (size == packed_size(n)) return unpack_trit_bits(bytes, n, plus, minus);
  return size < packed_size(n) && for_each_rice_code(bytes, size, n, [=](size_t i, uint32_t sign) {
           set_trit(plus, minus, i, sign == 0 ? 1 : -1);
         });
}

inline bool rice_unpack(const uint8_t* bytes, size_t size, size_t n, float m, float* out,
                        DecodeMode mode) {
  if (size == packed_size(n)) return unpack(bytes, n, m, out, mode);
  if (size > packed_size(n)) return false;
  if (mode == DecodeMode::kStore) std::fill_n(out, n, 0.0f);
  return with_output(out, mode, [=](auto to) {
    return for_each_rice_code(
        bytes, size, n, [=](size_t i, uint32_t sign) { put_trit(to, i, sign == 0 ? 1 : -1, m); });
  });
}

}  // namespace gradwire::scalar
