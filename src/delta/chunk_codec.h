#pragma once

// One chunk of a delta: at most kDeltaChunk elements, coded alone (spec/format.md, Delta).

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "stages/kernels.h"
#include "stages/rice/rice.h"

namespace gradwire {

inline constexpr uint64_t kDeltaChunk = kMostRiceTrits;
// The most bytes that a chunk of n elements takes, with those that its encoder may write after it.
// A step may need a bit more than its element, where two deltas were folded.
constexpr uint64_t chunk_room(uint64_t n, uint64_t width) { return n * width + n / 4 + 64; }

// The smallest of these is taken, where more than one is tried.
enum class ChunkMode : uint8_t {
  kUnchanged = 0,
  kSparse = 1,    // the places of the elements that changed, most of them by one step
  kDense = 2,     // the step of every element, by its number of bits
  kVerbatim = 3,  // the new elements
};

struct CodedChunk {
  ChunkMode mode = ChunkMode::kUnchanged;
  uint32_t size = 0;  // bytes
  uint32_t changed = 0;
};

// Codes how `from` becomes `after`, n elements of at most kDeltaChunk, into chunk_room(n) bytes.
template <typename Bits>
CodedChunk encode_chunk(const Kernels& kernels, const StepArrays<Bits>& arrays, uint64_t n,
                        ElementOrder order, uint8_t* out);

// The same for steps alone, whose elements are not known; never kVerbatim.
template <typename Bits>
CodedChunk encode_steps(const Kernels& kernels, Bits* steps, uint64_t n, uint8_t* out);

// Undoes encode_chunk in place. false: the bytes are not valid; some values may be changed then.
template <typename Bits>
bool apply_chunk(const Kernels& kernels, ChunkMode mode, std::span<const uint8_t> bytes,
                 Bits* values, uint64_t n, ElementOrder order);

// What a sparse chunk does to its elements. `changed` and `minus` are empty where none changes.
struct SparseSteps {
  std::vector<uint64_t> changed;  // a bit for each element
  std::vector<uint64_t> minus;    // whether its step is negative
  std::vector<uint16_t> far_places;
  std::vector<uint32_t> far_sizes;  // |step|, at least 2
};

// nullopt: the bytes are not valid.
template <typename Bits>
std::optional<SparseSteps> decode_sparse(const Kernels& kernels, std::span<const uint8_t> bytes,
                                         uint64_t n);

template <typename Bits>
void apply_steps(const Kernels& kernels, const SparseSteps& steps, Bits* values, uint64_t n,
                 ElementOrder order);

}  // namespace gradwire
