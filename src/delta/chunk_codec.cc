#include "delta/chunk_codec.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "base/varint.h"
#include "delta/dense_steps.h"
#include "stages/places/far_sizes_bits.h"
#include "stages/places/places_bits.h"
#include "stages/trits/trit_bits.h"

namespace gradwire {
namespace {

// Above this share of changed elements a chunk is not sparse, and up to the other it is not dense.
constexpr uint64_t kMostSparse = 4;  // n / 4
constexpr uint64_t kLeastDense = 8;  // n / 8

constexpr size_t kChunkWords = trit_words(kDeltaChunk);

// The changes of a chunk as bits.
struct ChunkSteps {
  uint64_t changed[kChunkWords];
  uint64_t minus[kChunkWords];
  uint64_t far[kChunkWords];

  StepBits bits() { return {changed, minus, far}; }
};

// Far steps in the order of their elements.
struct FarSteps {
  // No sparse chunk has more: an encoder makes sparse chunks of at most a quarter of changes.
  static constexpr size_t kMost = kDeltaChunk / kMostSparse;

  size_t count = 0;
  uint16_t places[kMost + kPlaceSlack];
  uint32_t sizes[kMost];  // |step|, at least 2
};

constexpr size_t bytes_of_bits(size_t count) { return (count + 7) / 8; }

size_t find_steps(const Kernels& kernels, const StepArrays<uint8_t>& arrays, size_t n,
                  ElementOrder order, StepBits steps) {
  return kernels.find_steps8(arrays, n, order, steps);
}
size_t find_steps(const Kernels& kernels, const StepArrays<uint16_t>& arrays, size_t n,
                  ElementOrder order, StepBits steps) {
  return kernels.find_steps16(arrays, n, order, steps);
}
size_t find_steps(const Kernels& kernels, const StepArrays<uint32_t>& arrays, size_t n,
                  ElementOrder order, StepBits steps) {
  return kernels.find_steps32(arrays, n, order, steps);
}

// A sparse chunk of at most n / kMostSparse changes.
class SparseCode {
 public:
  template <typename Bits>
  SparseCode(const Kernels& kernels, const ChunkSteps& steps, size_t changed, const Bits* from,
             const Bits* to, uint64_t n, ElementOrder order) {
    const size_t words = trit_words(n);
    uint8_t* at = bytes_;
    at += kernels.encode_places(steps.changed, n, changed, at);
    kernels.gather_bits(steps.minus, steps.changed, words, at);
    at += bytes_of_bits(changed);
    FarSteps far;
    far.count = kernels.list_places(steps.far, words, far.places);
    uint64_t of_changes[kChunkWords + 1];
    kernels.gather_bits(steps.far, steps.changed, words, reinterpret_cast<uint8_t*>(of_changes));
    at += kernels.encode_places(of_changes, changed, far.count, at);
    for (size_t i = 0; i < far.count; ++i) {
      const size_t place = far.places[i];
      far.sizes[i] = step_size(step_between(from[place], to[place], order));
    }
    if (far.count != 0) at += kernels.write_far_sizes(far.sizes, far.count, at);
    size_ = static_cast<uint64_t>(at - bytes_);
  }

  [[nodiscard]] uint64_t size() const { return size_; }
  void write(uint8_t* out) const { std::memcpy(out, bytes_, size_); }

 private:
  static constexpr size_t kMost = FarSteps::kMost;

  uint64_t size_ = 0;
  uint8_t bytes_[2 * places_room(kMost) + bytes_of_bits(kMost) + far_sizes_room(kMost)];
};

// Gives `before` the elements of words without changes, too.
template <typename Bits>
void complete_before(const StepArrays<Bits>& arrays, const ChunkSteps& steps, uint64_t n) {
  for (uint64_t at = 0; at < n; at += kWordBits) {
    if (steps.changed[at / kWordBits] == 0) {
      std::copy_n(arrays.after + at, std::min<uint64_t>(n - at, kWordBits), arrays.before + at);
    }
  }
}

// The smallest of a sparse and a dense chunk, if one has fewer than `limit` bytes with the number
// that says its size; kVerbatim, of which nothing is written, if none has.
template <typename Bits>
CodedChunk encode_below(uint64_t limit, const Kernels& kernels, const StepArrays<Bits>& arrays,
                        uint64_t n, ElementOrder order, uint8_t* out) {
  ChunkSteps steps;
  const size_t changed = find_steps(kernels, arrays, n, order, steps.bits());
  const Bits* from = arrays.before != nullptr ? arrays.before : arrays.from;
  const Bits* to = arrays.after;
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
    const SparseCode sparse(kernels, steps, changed, from, to, n, order);
    // At most a quarter of the elements changed.
    assert(sparse.size() <= chunk_room(n, sizeof(Bits)));
    if (take_if_smaller(ChunkMode::kSparse, sparse.size())) sparse.write(out);
  }
  // Each element of a dense chunk takes a bit or more, and each that changed one more, its sign.
  if (best.mode == ChunkMode::kVerbatim ||
      (changed > n / kLeastDense && 8 * uint64_t{best.size} > n + changed)) {
    if (arrays.before != nullptr) complete_before(arrays, steps, n);
    const DenseCode<Bits> dense(kernels, from, to, n, order);
    if (take_if_smaller(ChunkMode::kDense, dense.size())) dense.write(out);
  }
  return best;
}

// Reads a sparse chunk. false: the bytes are not valid.
bool read_sparse(const Kernels& kernels, std::span<const uint8_t> bytes, uint64_t n,
                 uint32_t largest, ChunkSteps& steps, FarSteps& far) {
  const size_t words = trit_words(n);
  const auto read_places = [&](size_t of, uint64_t* bits, size_t& count) {
    const size_t size = kernels.decode_places(bytes.data(), bytes.size(), of, bits, count);
    bytes = bytes.subspan(size);
    return size != 0;
  };
  size_t changed = 0;
  if (!read_places(n, steps.changed, changed)) return false;
  const size_t signs = bytes_of_bits(changed);
  if (bytes.size() < signs) return false;
  // With bytes after the last, which spread_bits may read.
  uint64_t of_changes[kChunkWords + 2];
  of_changes[changed / kWordBits] = 0;
  std::memcpy(of_changes, bytes.data(), signs);
  if (changed % 8 != 0 && bytes[signs - 1] >> changed % 8 != 0) return false;
  bytes = bytes.subspan(signs);
  const auto* gathered = reinterpret_cast<const uint8_t*>(of_changes);
  kernels.spread_bits(gathered, steps.changed, words, steps.minus);
  if (!read_places(changed, of_changes, far.count)) return false;
  if (far.count == 0) return bytes.empty();
  if (far.count > FarSteps::kMost) return false;
  kernels.spread_bits(gathered, steps.changed, words, steps.far);
  kernels.list_places(steps.far, words, far.places);
  return kernels.read_far_sizes(bytes.data(), bytes.size(), largest, far.sizes, far.count);
}

// Moves the elements by the steps of a sparse chunk.
template <typename Bits>
void move_elements(const Kernels& kernels, const uint64_t* changed, const uint64_t* minus,
                   std::span<const uint16_t> far_places, const uint32_t* far_sizes, Bits* values,
                   uint64_t n, ElementOrder order) {
  if constexpr (sizeof(Bits) == 1) {
    kernels.move_by_one8(values, n, order, changed, minus);
  } else if constexpr (sizeof(Bits) == 2) {
    kernels.move_by_one16(values, n, order, changed, minus);
  } else {
    kernels.move_by_one32(values, n, order, changed, minus);
  }
  for (size_t i = 0; i < far_places.size(); ++i) {
    const size_t place = far_places[i];
    const auto negative =
        static_cast<Bits>(0 - (minus[place / kWordBits] >> place % kWordBits & 1));
    const auto more = static_cast<Bits>(far_sizes[i] - 1);
    values[place] =
        step_from(values[place], static_cast<Bits>((more ^ negative) - negative), order);
  }
}

template <typename Bits>
bool apply_sparse(const Kernels& kernels, std::span<const uint8_t> bytes, Bits* values, uint64_t n,
                  ElementOrder order) {
  ChunkSteps steps;
  FarSteps far;
  if (!read_sparse(kernels, bytes, n, kSignBit<Bits>, steps, far)) return false;
  move_elements(kernels, steps.changed, steps.minus, std::span(far.places, far.count), far.sizes,
                values, n, order);
  return true;
}

}  // namespace

template <typename Bits>
CodedChunk encode_chunk(const Kernels& kernels, const StepArrays<Bits>& arrays, uint64_t n,
                        ElementOrder order, uint8_t* out) {
  const uint64_t size = n * sizeof(Bits);
  CodedChunk coded = encode_below(size, kernels, arrays, n, order, out);
  if (coded.mode == ChunkMode::kVerbatim) {
    std::memcpy(out, arrays.after, size);
    coded.size = static_cast<uint32_t>(size);
  }
  return coded;
}

template <typename Bits>
CodedChunk encode_steps(const Kernels& kernels, Bits* steps, uint64_t n, uint8_t* out) {
  static constexpr Bits kNone[kDeltaChunk] = {};
  const StepArrays<Bits> arrays{kNone, steps, nullptr, steps};
  return encode_below(UINT64_MAX, kernels, arrays, n, ElementOrder::kInteger, out);
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

template <typename Bits>
std::optional<SparseSteps> decode_sparse(const Kernels& kernels, std::span<const uint8_t> bytes,
                                         uint64_t n) {
  ChunkSteps steps;
  FarSteps far;
  if (!read_sparse(kernels, bytes, n, kSignBit<Bits>, steps, far)) return std::nullopt;
  const size_t words = trit_words(n);
  const auto is_zero = [](uint64_t bits) { return bits == 0; };
  if (std::ranges::all_of(std::span(steps.changed, words), is_zero)) return SparseSteps{};
  return SparseSteps{{steps.changed, steps.changed + words},
                     {steps.minus, steps.minus + words},
                     {far.places, far.places + far.count},
                     {far.sizes, far.sizes + far.count}};
}

template <typename Bits>
void apply_steps(const Kernels& kernels, const SparseSteps& steps, Bits* values, uint64_t n,
                 ElementOrder order) {
  if (steps.changed.empty()) return;
  move_elements<Bits>(kernels, steps.changed.data(), steps.minus.data(), steps.far_places,
                      steps.far_sizes.data(), values, n, order);
}

template CodedChunk encode_chunk(const Kernels&, const StepArrays<uint8_t>&, uint64_t, ElementOrder,
                                 uint8_t*);
template CodedChunk encode_steps(const Kernels&, uint8_t*, uint64_t, uint8_t*);
template bool apply_chunk(const Kernels&, ChunkMode, std::span<const uint8_t>, uint8_t*, uint64_t,
                          ElementOrder);
template std::optional<SparseSteps> decode_sparse<uint8_t>(const Kernels&, std::span<const uint8_t>,
                                                           uint64_t);
template void apply_steps(const Kernels&, const SparseSteps&, uint8_t*, uint64_t, ElementOrder);
template CodedChunk encode_chunk(const Kernels&, const StepArrays<uint16_t>&, uint64_t,
                                 ElementOrder, uint8_t*);
template CodedChunk encode_steps(const Kernels&, uint16_t*, uint64_t, uint8_t*);
template bool apply_chunk(const Kernels&, ChunkMode, std::span<const uint8_t>, uint16_t*, uint64_t,
                          ElementOrder);
template std::optional<SparseSteps> decode_sparse<uint16_t>(const Kernels&,
                                                            std::span<const uint8_t>, uint64_t);
template void apply_steps(const Kernels&, const SparseSteps&, uint16_t*, uint64_t, ElementOrder);
template CodedChunk encode_chunk(const Kernels&, const StepArrays<uint32_t>&, uint64_t,
                                 ElementOrder, uint8_t*);
template CodedChunk encode_steps(const Kernels&, uint32_t*, uint64_t, uint8_t*);
template bool apply_chunk(const Kernels&, ChunkMode, std::span<const uint8_t>, uint32_t*, uint64_t,
                          ElementOrder);
template std::optional<SparseSteps> decode_sparse<uint32_t>(const Kernels&,
                                                            std::span<const uint8_t>, uint64_t);
template void apply_steps(const Kernels&, const SparseSteps&, uint32_t*, uint64_t, ElementOrder);

}  // namespace gradwire
