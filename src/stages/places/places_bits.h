#pragma once

// Writes and reads places. Kernels of every target use these functions, so all of them are inlined
// and compiled for the target.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/base.h"

#include "base/varint.h"
#include "stages/places/gap_tables.h"
#include "stages/places/places.h"
#include "stages/rice/rice_bits.h"

namespace gradwire {

// Numbers that append_places may write after the places of a word, and write_run may read after
// those of a run.
inline constexpr size_t kPlaceSlack = 64;

// Appends the places of a word's set bits and returns their number.
HWY_INLINE size_t append_places(uint64_t word, size_t first, uint16_t* places) {
  const auto count = static_cast<size_t>(std::popcount(word));
  for (size_t i = 0; i < count; i += 4) {
    for (size_t j = 0; j < 4; ++j) {
      const int bit = __builtin_ctzll(word | uint64_t{1} << 63);
      places[i + j] = static_cast<uint16_t>(first + static_cast<size_t>(bit));
      word &= word - 1;
    }
  }
  return count;
}

// Kernels::list_places. append: as append_places.
template <typename Append>
HWY_INLINE size_t list_set_bits(const uint64_t* bits, size_t words, uint16_t* places,
                                const Append& append) {
  size_t count = 0;
  for (size_t word = 0; word < words; ++word) {
    count += append(bits[word], word * kWordBits, places + count);
  }
  return count;
}

// Kernels::encode_places. write(places, count, length, writer) codes the gaps before places[1] to
// places[count]; places[0] is the place before the run, places[count] the run's end.
template <typename Append, typename Write>
HWY_INLINE size_t encode_place_runs(const uint64_t* bits, size_t n, size_t count, uint8_t* out,
                                    const Append& append, const Write& write) {
  const size_t runs = place_runs(count);
  uint8_t* at = out;
  *at++ = static_cast<uint8_t>(runs);
  if (runs == 0) return 1;
  const size_t words = trit_words(n);
  const size_t run = place_run_words(n, runs);
  // One run has few places, several are short.
  uint16_t places[kMostPlaces / kPlaceRuns + 2 + kPlaceSlack];
  uint8_t* sizes = at;
  at += (runs - 1) * kLongestVarint;
  uint8_t* strings = at;
  size_t lengths[kPlaceRuns];
  for (size_t r = 0; r < runs; ++r) {
    const size_t first = std::min(r * run, words);
    const size_t last = std::min(first + run, words);
    const size_t length = std::min(last * kWordBits, n) - std::min(first * kWordBits, n);
    places[0] = UINT16_MAX;
    size_t listed = 1 + list_set_bits(bits + first, last - first, places + 1, append);
    for (size_t i = 0; i < kPlaceSlack; ++i) {
      places[listed + i] = static_cast<uint16_t>(length + i);  // gaps of 0 after the run's end
    }
    RiceWriter writer{at};
    write(places, listed, length, writer);
    uint8_t* end = writer.out + (writer.held != 0 ? 1 : 0);
    lengths[r] = static_cast<size_t>(end - at);
    at = end;
  }
  for (size_t r = 0; r + 1 < runs; ++r) {
    sizes = write_varint(static_cast<uint32_t>(lengths[r]), sizes);
  }
  std::memmove(sizes, strings, static_cast<size_t>(at - strings));
  return static_cast<size_t>(at - strings + sizes - out);
}

// One run on its way from its string to marks.
struct PlaceReader {
  RiceReader reader;
  uint8_t* marks;  // a byte for each bit, which becomes 1 where the bit is set
  size_t end;      // the run's length
  size_t at = 0;   // the place after the last; end + 1 when the run's end was read
  int k = 0;
  uint64_t low_mask = 0;
  const GapTable::Entry* table = nullptr;

  HWY_INLINE void begin() {
    reader.fill_to_end();
    k = static_cast<int>(reader.bits & (kRiceChoices - 1));
    low_mask = (uint64_t{1} << k) - 1;
    if (k <= kLargestTableK) table = kGapTables.of[k].entries;
    reader.drop(kRiceHeadBits);
  }
  HWY_INLINE void fill() {
    if (reader.has_word()) {
      reader.fill();
    } else {
      reader.fill_to_end();
    }
  }
  // Reads a gap, and calls mark(place) with the place after it. false: that is the run's end or
  // beyond.
  template <typename Mark>
  HWY_INLINE bool step(const Mark& mark) {
    const size_t place = at + reader.take_gap(k, low_mask);
    at = place + 1;
    if (place >= end) return false;
    mark(place);
    return true;
  }
  HWY_INLINE bool step() {
    return step([this](size_t place) { marks[place] = 1; });
  }
  // Reads some gaps; needs reader.has_word(). false: the string is cut off, or the end is near.
  HWY_INLINE bool advance() {
    reader.fill();
    if (table == nullptr) return step() && step();
    for (int i = 0; i < kLookups; ++i) {
      const GapTable::Entry entry = table[reader.bits % GapTable::kSize];
      if (HWY_UNLIKELY(entry.length == 0)) {
        fill();
        return step() && reader.held >= 0;
      }
      if (HWY_UNLIKELY(at + entry.places[2] >= end)) return false;
      for (const uint8_t place : entry.places) marks[at + place] = 1;
      at += entry.places[2] + size_t{1};
      reader.drop(entry.length);
    }
    return true;
  }
  // Reads what is left. Returns where the next string begins, nullptr if the bytes are not valid.
  template <typename Mark>
  HWY_INLINE const uint8_t* finish(const Mark& mark) {
    while (at <= end && reader.held >= 0) {
      fill();
      step(mark);
    }
    if (at != end + 1 || reader.held < 0) return nullptr;
    const uint64_t padding = reader.bits & ((uint64_t{1} << reader.held % 8) - 1);
    return padding == 0 ? reader.next - reader.held / 8 : nullptr;
  }
  HWY_INLINE const uint8_t* finish() {
    while (at <= end && reader.has_word() && advance()) {
    }
    return finish([this](size_t place) { marks[place] = 1; });
  }

 private:
  static constexpr int kLookups = 4;
  static_assert(kLookups * GapTable::kBits <= int{kMostBetweenFlushes});
};

// Kernels::decode_places. collect(marks, words, bits) makes bits of marks.
template <typename Collect>
HWY_INLINE size_t decode_place_runs(const uint8_t* bytes, size_t size, size_t n, uint64_t* bits,
                                    const Collect& collect) {
  static_assert(kPlaceRuns == 4);
  const size_t words = trit_words(n);
  const uint8_t* at = bytes;
  const uint8_t* end = bytes + size;
  if (at == end) return 0;
  const size_t runs = *at++;
  if (runs <= 1) std::fill_n(bits, words, 0);
  if (runs == 0) return 1;
  if (runs == 1) {  // few places: no marks
    PlaceReader reader{.reader = {at, end}, .marks = nullptr, .end = n};
    reader.begin();
    at = reader.finish(
        [=](size_t place) { bits[place / kWordBits] |= uint64_t{1} << place % kWordBits; });
    return at == nullptr ? 0 : static_cast<size_t>(at - bytes);
  }
  if (runs != kPlaceRuns) return 0;
  size_t sizes[kPlaceRuns] = {};
  for (size_t r = 0; r + 1 < runs; ++r) {
    const auto length = read_varint(at, end);
    if (!length) return 0;
    sizes[r] = *length;
  }
  uint8_t marks[kMostPlaces];
  std::memset(marks, 0, words * kWordBits);
  PlaceReader readers[kPlaceRuns];
  const uint8_t* begins[kPlaceRuns];
  const size_t run = place_run_words(n, runs) * kWordBits;
  for (size_t r = 0; r < runs; ++r) {
    const size_t first = std::min(r * run, n);
    readers[r] = {.reader = {at, end}, .marks = marks + first, .end = std::min(run, n - first)};
    readers[r].begin();
    begins[r] = at;
    if (sizes[r] > static_cast<size_t>(end - at)) return 0;
    at += sizes[r];
  }
  PlaceReader a = readers[0];
  PlaceReader b = readers[1];
  PlaceReader c = readers[2];
  PlaceReader d = readers[3];
  while (a.reader.has_word() && b.reader.has_word() && c.reader.has_word() && d.reader.has_word() &&
         a.advance() && b.advance() && c.advance() && d.advance()) {
  }
  if (a.finish() != begins[1] || b.finish() != begins[2] || c.finish() != begins[3]) return 0;
  at = d.finish();
  collect(marks, words, bits);
  return at == nullptr ? 0 : static_cast<size_t>(at - bytes);
}

HWY_INLINE size_t count_bits(const uint64_t* bits, size_t words) {
  size_t count = 0;
  for (size_t i = 0; i < words; ++i) count += static_cast<size_t>(std::popcount(bits[i]));
  return count;
}

// The bits of `word` where those of `mask` are set, moved together; and the way back.
HWY_INLINE uint64_t gather_word(uint64_t word, uint64_t mask) {
  uint64_t gathered = 0;
  for (int i = 0; mask != 0; ++i, mask &= mask - 1) {
    gathered |= (word >> std::countr_zero(mask) & 1) << i;
  }
  return gathered;
}
HWY_INLINE uint64_t spread_word(uint64_t gathered, uint64_t mask) {
  uint64_t word = 0;
  for (; mask != 0; gathered >>= 1, mask &= mask - 1) {
    word |= (gathered & 1) << std::countr_zero(mask);
  }
  return word;
}

// Kernels::gather_bits. gather: as gather_word.
template <typename Gather>
HWY_INLINE void gather_words(const uint64_t* bits, const uint64_t* mask, size_t words, uint8_t* out,
                             const Gather& gather) {
  uint64_t waiting = 0;  // the last `held` bits, fewer than 64
  uint32_t held = 0;
  for (size_t i = 0; i < words; ++i) {
    const uint64_t gathered = gather(bits[i], mask[i]);
    const uint32_t all = held + static_cast<uint32_t>(std::popcount(mask[i]));
    waiting |= gathered << held;
    std::memcpy(out, &waiting, sizeof waiting);
    // Without a branch, which would guess the number of bits.
    const bool full = all >= kWordBits;
    const uint64_t rest = gathered >> 1 >> (63 - held);
    waiting = full ? rest : waiting;
    out += full ? sizeof waiting : 0;
    held = all % kWordBits;
  }
  std::memcpy(out, &waiting, sizeof waiting);
}

// Kernels::spread_bits. spread: as spread_word.
template <typename Spread>
HWY_INLINE void spread_words(const uint8_t* gathered, const uint64_t* mask, size_t words,
                             uint64_t* bits, const Spread& spread) {
  size_t at = 0;
  for (size_t i = 0; i < words; ++i) {
    uint64_t lower;
    std::memcpy(&lower, gathered + at / 8, sizeof lower);
    const uint64_t upper = gathered[at / 8 + 8];
    const size_t skipped = at % 8;
    bits[i] = spread(lower >> skipped | upper << 1 << (63 - skipped), mask[i]);
    at += static_cast<size_t>(std::popcount(mask[i]));
  }
}

}  // namespace gradwire
