#include "delta/chunk_codec.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "delta/dense_steps.h"
#include "delta/far_steps.h"
#include "delta/varint.h"
#include "stages/trits/trit_bits.h"

namespace gradwire {
namespace {

// Above this share of changed elements a chunk is not sparse, and up to the other it is not dense:
// every element of a dense chunk takes a bit or more.
constexpr uint64_t kMostSparse = 4;  // n / 4
constexpr uint64_t kLeastDense = 8;  // n / 8

constexpr size_t kChunkWords = trit_words(kDeltaChunk);

// The changes of a chunk as bits.
struct ChunkSteps {
  uint64_t plus[kChunkWords];
  uint64_t minus[kChunkWords];
  uint64_t far[kChunkWords];

  StepBits bits() { return {plus, minus, far}; }
};

size_t find_steps(const Kernels& kernels, const uint8_t* from, const uint8_t* to, size_t n,
                  ElementOrder order, StepBits steps) {
  return kernels.find_steps8(from, to, n, order, steps);
}
size_t find_steps(const Kernels& kernels, const uint16_t* from, const uint16_t* to, size_t n,
                  ElementOrder order, StepBits steps) {
  return kernels.find_steps16(from, to, n, order, steps);
}
size_t find_steps(const Kernels& kernels, const uint32_t* from, const uint32_t* to, size_t n,
                  ElementOrder order, StepBits steps) {
  return kernels.find_steps32(from, to, n, order, steps);
}

// Codes at most n / kMostSparse changes. Returns the size, or 0 if there is no room.
template <typename Bits>
uint64_t encode_sparse(const Kernels& kernels, StepBits steps, const Bits* from, const Bits* to,
                       uint64_t n, ElementOrder order, uint8_t* out) {
  FarSteps far;
  uint32_t marks[FarSteps::kMost + kMarkSlack];
  far.count = kernels.list_far_steps(steps, n, marks, far.gaps);
  for (size_t i = 0; i < far.count; ++i) {
    const uint32_t place = place_of_mark(marks[i]);
    far.sizes[i] = step_size(step_between(from[place], to[place], order));
  }
  const FarCode code = choose_far_code(far);
  const uint64_t most = code.bytes + packed_size(n) + sizeof(uint64_t);
  if (most > chunk_room(n, sizeof(Bits))) return 0;
  uint8_t* end = write_far_steps(far, code, out);
  end += kernels.rice_encode(steps.plus, steps.minus, n, end);
  return static_cast<uint64_t>(end - out);
}

// The smallest of a sparse and a dense chunk, if one has fewer than `limit` bytes with the number
// that says its size; kVerbatim, of which nothing is written, if none has.
template <typename Bits>
CodedChunk encode_below(uint64_t limit, const Kernels& kernels, const Bits* from, const Bits* to,
                        uint64_t n, ElementOrder order, uint8_t* out) {
  ChunkSteps steps;
  const size_t changed = find_steps(kernels, from, to, n, order, steps.bits());
  if (changed == 0) return {};
  CodedChunk best{.mode = ChunkMode::kVerbatim, .changed = static_cast<uint32_t>(changed)};
  const auto take_if_smaller = [&](ChunkMode mode, uint64_t size) {
    const uint64_t whole = size + varint_size(static_cast<uint32_t>(size));
    if (whole >= limit) return false;
    best = {mode, static_cast<uint32_t>(size), best.changed};
    limit = whole;
    return true;
  };
  if (changed <= n / kMostSparse) {
    const uint64_t size = encode_sparse(kernels, steps.bits(), from, to, n, order, out);
    if (size != 0) take_if_smaller(ChunkMode::kSparse, size);
  }
  if (changed > n / kLeastDense || best.mode == ChunkMode::kVerbatim) {
    const DenseCode<Bits> dense(from, to, n, order);
    if (take_if_smaller(ChunkMode::kDense, dense.size())) dense.write(kernels, out);
  }
  return best;
}

// Fetches the elements into L2 in their order, because a few of them, here and there, would be read
// one by one. Inlined: g++ drops calls of functions that only prefetch.
template <typename Bits>
[[gnu::always_inline]] inline void fetch(const Bits* values, uint64_t n) {
  constexpr size_t kLine = 64;
  for (size_t i = 0; i < n; i += kLine / sizeof(Bits)) __builtin_prefetch(values + i, 1, 2);
}

template <typename Bits>
bool apply_sparse(const Kernels& kernels, std::span<const uint8_t> bytes, Bits* values, uint64_t n,
                  ElementOrder order) {
  constexpr uint32_t kLargest = kSignBit<Bits>;
  FarSteps far;
  const size_t head = read_far_steps(bytes.data(), bytes.size(), n, kLargest, far);
  if (head == 0) return false;
  fetch(values, n);
  const auto trits = bytes.subspan(head);
  const auto marks = std::make_unique_for_overwrite<uint32_t[]>(most_rice_marks(trits.size(), n));
  const size_t count = kernels.rice_marks(trits.data(), trits.size(), n, marks.get());
  if (count == kNoMarks) return false;
  const auto move = [&](uint32_t mark, Bits size) {
    const auto negative = static_cast<Bits>(Bits{0} - static_cast<Bits>(mark & 1));
    Bits& value = values[place_of_mark(mark)];
    value = step_from(value, static_cast<Bits>((size ^ negative) - negative), order);
  };
  for (size_t i = 0; i < count; ++i) move(marks[i], 1);
  size_t next = 0;  // the change after the last far one
  for (size_t i = 0; i < far.count; ++i) {
    const size_t at = next + far.gaps[i];
    if (at >= count) return false;
    move(marks[at], static_cast<Bits>(far.sizes[i] - 1));
    next = at + 1;
  }
  return true;
}

}  // namespace

template <typename Bits>
CodedChunk encode_chunk(const Kernels& kernels, const Bits* from, const Bits* to, uint64_t n,
                        ElementOrder order, uint8_t* out) {
  const uint64_t size = n * sizeof(Bits);
  CodedChunk coded = encode_below(size, kernels, from, to, n, order, out);
  if (coded.mode == ChunkMode::kVerbatim) {
    std::memcpy(out, to, size);
    coded.size = static_cast<uint32_t>(size);
  }
  return coded;
}

template <typename Bits>
CodedChunk encode_steps(const Kernels& kernels, const Bits* steps, uint64_t n, uint8_t* out) {
  static constexpr Bits kNone[kDeltaChunk] = {};
  return encode_below(UINT64_MAX, kernels, kNone, steps, n, ElementOrder::kInteger, out);
}

template <typename Bits>
bool apply_chunk(const Kernels& kernels, ChunkMode mode, std::span<const uint8_t> bytes,
                 Bits* values, uint64_t n, ElementOrder order) {
  switch (mode) {
    case ChunkMode::kUnchanged:
      return true;
    case ChunkMode::kSparse:
      return apply_sparse(kernels, bytes, values, n, order);
    case ChunkMode::kDense:
      return apply_dense(kernels, bytes, values, n, order);
    case ChunkMode::kVerbatim:
      std::memcpy(values, bytes.data(), n * sizeof(Bits));
      return true;
  }
  return false;
}

template CodedChunk encode_chunk(const Kernels&, const uint8_t*, const uint8_t*, uint64_t,
                                 ElementOrder, uint8_t*);
template CodedChunk encode_steps(const Kernels&, const uint8_t*, uint64_t, uint8_t*);
template bool apply_chunk(const Kernels&, ChunkMode, std::span<const uint8_t>, uint8_t*, uint64_t,
                          ElementOrder);
template CodedChunk encode_chunk(const Kernels&, const uint16_t*, const uint16_t*, uint64_t,
                                 ElementOrder, uint8_t*);
template CodedChunk encode_steps(const Kernels&, const uint16_t*, uint64_t, uint8_t*);
template bool apply_chunk(const Kernels&, ChunkMode, std::span<const uint8_t>, uint16_t*, uint64_t,
                          ElementOrder);
template CodedChunk encode_chunk(const Kernels&, const uint32_t*, const uint32_t*, uint64_t,
                                 ElementOrder, uint8_t*);
template CodedChunk encode_steps(const Kernels&, const uint32_t*, uint64_t, uint8_t*);
template bool apply_chunk(const Kernels&, ChunkMode, std::span<const uint8_t>, uint32_t*, uint64_t,
                          ElementOrder);

}  // namespace gradwire
