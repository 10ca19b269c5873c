#include "delta/chunk_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "delta/dense_steps.h"
#include "delta/far_steps.h"
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

  [[nodiscard]] uint64_t any(size_t word) const { return plus[word] | minus[word]; }
  [[nodiscard]] uint32_t count(size_t words) const {
    uint32_t changed = 0;
    for (size_t word = 0; word < words; ++word) {
      changed += static_cast<uint32_t>(std::popcount(any(word)));
    }
    return changed;
  }
};

void find_steps(const Kernels& kernels, const uint8_t* from, const uint8_t* to, size_t n,
                ElementOrder order, StepBits steps) {
  kernels.find_steps8(from, to, n, order, steps);
}
void find_steps(const Kernels& kernels, const uint16_t* from, const uint16_t* to, size_t n,
                ElementOrder order, StepBits steps) {
  kernels.find_steps16(from, to, n, order, steps);
}
void find_steps(const Kernels& kernels, const uint32_t* from, const uint32_t* to, size_t n,
                ElementOrder order, StepBits steps) {
  kernels.find_steps32(from, to, n, order, steps);
}

// Lists the far steps. false if they are more than a list holds.
template <typename Bits>
bool list_far_steps(const ChunkSteps& steps, const Bits* from, const Bits* to, size_t words,
                    ElementOrder order, FarSteps& far) {
  far.count = 0;
  uint32_t place = 0;  // of the word's first change among all changes
  uint32_t next = 0;   // the change after the last far one
  for (size_t word = 0; word < words; ++word) {
    const uint64_t any = steps.any(word);
    for (uint64_t left = steps.far[word]; left != 0; left &= left - 1) {
      if (far.count == FarSteps::kMost) return false;
      const auto bit = static_cast<size_t>(std::countr_zero(left));
      const size_t i = word * kWordBits + bit;
      const uint64_t below = any & ((uint64_t{1} << bit) - 1);
      const uint32_t at = place + static_cast<uint32_t>(std::popcount(below));
      far.gaps[far.count] = static_cast<uint16_t>(at - next);
      far.sizes[far.count] = step_size(step_between(from[i], to[i], order));
      ++far.count;
      next = at + 1;
    }
    place += static_cast<uint32_t>(std::popcount(any));
  }
  return true;
}

// Returns the size, or 0 if a list has no room.
template <typename Bits>
uint64_t encode_sparse(const Kernels& kernels, const ChunkSteps& steps, const Bits* from,
                       const Bits* to, uint64_t n, ElementOrder order, uint8_t* out) {
  FarSteps far;
  if (!list_far_steps(steps, from, to, trit_words(n), order, far)) return 0;
  const FarCode code = choose_far_code(far);
  const uint64_t most = code.bytes + packed_size(n) + sizeof(uint64_t);
  if (most > chunk_room(n, sizeof(Bits))) return 0;
  uint8_t* end = write_far_steps(far, code, out);
  end += kernels.rice_encode(steps.plus, steps.minus, n, end);
  return static_cast<uint64_t>(end - out);
}

// The smallest of a sparse and a dense chunk, if one has fewer than `limit` bytes; kVerbatim, of
// which nothing is written, if none has.
template <typename Bits>
CodedChunk encode_below(uint64_t limit, const Kernels& kernels, const Bits* from, const Bits* to,
                        uint64_t n, ElementOrder order, uint8_t* out) {
  ChunkSteps steps;
  find_steps(kernels, from, to, n, order, {steps.plus, steps.minus, steps.far});
  CodedChunk best{.mode = ChunkMode::kVerbatim, .changed = steps.count(trit_words(n))};
  if (best.changed == 0) return {};
  const auto take = [&](ChunkMode mode, uint64_t size) {
    best = {mode, static_cast<uint32_t>(size), best.changed};
    limit = size;
  };
  if (best.changed <= n / kMostSparse) {
    const uint64_t size = encode_sparse(kernels, steps, from, to, n, order, out);
    if (size != 0 && size < limit) take(ChunkMode::kSparse, size);
  }
  if (best.changed > n / kLeastDense || best.mode == ChunkMode::kVerbatim) {
    const DenseCode<Bits> dense(StepCounts<Bits>(from, to, n, order));
    if (dense.size() < limit) {
      dense.write(from, to, n, order, out);
      take(ChunkMode::kDense, dense.size());
    }
  }
  return best;
}

template <typename Bits>
bool apply_sparse(const Kernels& kernels, std::span<const uint8_t> bytes, Bits* values, uint64_t n,
                  ElementOrder order) {
  constexpr uint32_t kLargest = kSignBit<Bits>;
  FarSteps far;
  const size_t head = read_far_steps(bytes.data(), bytes.size(), n, kLargest, far);
  if (head == 0) return false;
  uint64_t plus[kChunkWords];
  uint64_t minus[kChunkWords];
  if (!kernels.rice_decode(bytes.data() + head, bytes.size() - head, n, plus, minus)) return false;
  size_t next_far = 0;
  uint32_t to_far = far.count > 0 ? far.gaps[0] : UINT32_MAX;  // changes before the next far step
  for (size_t word = 0; word < trit_words(n); ++word) {
    for (uint64_t left = plus[word] | minus[word]; left != 0; left &= left - 1) {
      const uint64_t bit = left & -left;
      Bits& value = values[word * kWordBits + static_cast<size_t>(std::countr_zero(left))];
      Bits size = 1;
      if (to_far-- == 0) {
        size = static_cast<Bits>(far.sizes[next_far++]);
        to_far = next_far < far.count ? far.gaps[next_far] : UINT32_MAX;
      }
      const bool negative = (minus[word] & bit) != 0;
      value = step_from(value, negative ? static_cast<Bits>(Bits{0} - size) : size, order);
    }
  }
  return next_far == far.count;
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
      return apply_dense(bytes, values, n, order);
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
