#pragma once

// The scalar kernels of places. Contracts: stages/kernels.def.

#include <cstddef>
#include <cstdint>

#include "stages/places/far_sizes_bits.h"
#include "stages/places/places.h"
#include "stages/places/places_bits.h"

namespace gradwire::scalar {

// Codes the gaps before places[1] to places[count], whose sum is that of the zeros in `length`
// bits.
inline void write_places(const uint16_t* places, size_t count, size_t length, RiceWriter& writer) {
  const auto gap = [&](size_t i) {
    return static_cast<uint32_t>(static_cast<uint16_t>(places[i + 1] - places[i] - 1));
  };
  const GapChoices choices(length + 1 - count, count);
  int best = 0;
  uint64_t fewest = UINT64_MAX;
  for (int k = choices.first; k <= choices.last; ++k) {
    uint64_t bits = 0;
    for (size_t i = 0; i < count; ++i) bits += static_cast<uint64_t>(gap_length(gap(i), k));
    if (bits < fewest) best = k, fewest = bits;
  }
  writer.put(0, static_cast<uint64_t>(best), kRiceHeadBits);
  writer.flush();
  for (size_t i = 0; i < count; ++i) {
    const RiceCode code = gap_code(gap(i), best);
    writer.put(0, code.bits, static_cast<uint32_t>(code.length));
    writer.flush();
  }
}

inline size_t encode_places(const uint64_t* bits, size_t n, size_t count, uint8_t* out) {
  return encode_place_runs(bits, n, count, out, append_places, write_places);
}

inline void collect_marks(const uint8_t* marks, size_t words, uint64_t* bits) {
  for (size_t word = 0; word < words; ++word) {
    bits[word] = 0;
    for (size_t i = 0; i < kWordBits; ++i) bits[word] |= uint64_t{marks[word * kWordBits + i]} << i;
  }
}

inline size_t decode_places(const uint8_t* bytes, size_t size, size_t n, uint64_t* bits,
                            size_t& count) {
  const size_t taken = decode_place_runs(bytes, size, n, bits, collect_marks);
  count = taken == 0 ? 0 : count_bits(bits, trit_words(n));
  return taken;
}

inline size_t list_places(const uint64_t* bits, size_t words, uint16_t* places) {
  return list_set_bits(bits, words, places, append_places);
}

inline void gather_bits(const uint64_t* bits, const uint64_t* mask, size_t words, uint8_t* out) {
  gather_words(bits, mask, words, out, gather_word);
}

inline void spread_bits(const uint8_t* gathered, const uint64_t* mask, size_t words,
                        uint64_t* bits) {
  spread_words(gathered, mask, words, bits, spread_word);
}

inline size_t write_far_sizes(const uint32_t* sizes, size_t count, uint8_t* out) {
  return write_size_strings(sizes, count, out);
}

inline bool read_far_sizes(const uint8_t* bytes, size_t size, uint32_t largest, uint32_t* sizes,
                           size_t count) {
  return read_size_strings(bytes, size, largest, sizes, count);
}

}  // namespace gradwire::scalar
