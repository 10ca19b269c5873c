#pragma once

// Levels in Elias codes (spec/format.md, qsgd). Each block handles one chunk: it adds up the
// lengths of the codes, finds its place, and then writes one row of codes after the other.

#include <cstdint>

#include "codecs/qsgd/qsgd.h"
#include "cuda/levels/level_encode.cuh"
#include "stages/elias/elias.h"

namespace gradwire::cuda {

// A code of at most 24 bits, its length in the upper 8.
__device__ inline uint32_t pack_code(BitCode code) {
  return static_cast<uint32_t>(code.length) << 24 | static_cast<uint32_t>(code.bits);
}

inline constexpr uint32_t kListedDistances = 256;
// Each thread handles eight values of a row. Their codes take at most 16 bits for each value, 16
// more where a long gap ends, and up to 7 for the unfinished byte before the row.
inline constexpr uint32_t kRowValues = 8 * kThreads;
inline constexpr uint32_t kRowWords = kRowValues * 16 / 32 + 3;

// The shared memory of a block.
struct EliasShared {
  LevelBytes levels;
  uint32_t of_level[256];  // by level + s
  uint32_t of_distance[kListedDistances];
  uint32_t row[kRowWords];  // bits, the highest first
  uint32_t last;            // after the last level of the rows before that is not 0
  BlockShared shared;
};

// Reads the levels of a chunk in order, four at a time.
class LevelReader {
 public:
  __device__ LevelReader(const EliasShared& shared, uint32_t n, int32_t levels, LevelCoder coder)
      : shared_(&shared),
        n_(n),
        zeros_(static_cast<uint32_t>(levels) * 0x01010101u),
        sparse_(coder == LevelCoder::kSparse) {}

  // The place after the last level from `begin` to `end` that is not 0; 0 if all are 0.
  __device__ uint32_t last_in(uint32_t begin, uint32_t end) const {
    uint32_t last = 0;
    if (sparse_) for_each(begin, end, [&](uint32_t at, uint32_t) { last = at + 1; });
    return last;
  }

  // Calls put(code) for the codes of the levels from `begin` to `end`. `last`: the place after the
  // last level before them that is not 0.
  template <typename Put>
  __device__ void for_each_code(uint32_t begin, uint32_t end, uint32_t last, const Put& put) const {
    for_each(begin, end, [&](uint32_t at, uint32_t level) {
      if (sparse_) put(distance_code(at + 1 - last));
      put(shared_->of_level[level]);
      last = at + 1;
    });
  }

  // The code after the last level, if distances are coded: the distance to the place after it.
  __device__ uint32_t end_code(uint32_t last) const { return distance_code(n_ + 1 - last); }
  __device__ bool sparse() const { return sparse_; }

 private:
  __device__ uint32_t distance_code(uint32_t distance) const {
    return distance < kListedDistances ? shared_->of_distance[distance]
                                       : pack_code(elias_code(distance));
  }

  // begin % 4 == 0. Calls body(at, level + s) for the levels that are coded.
  template <typename Body>
  __device__ void for_each(uint32_t begin, uint32_t end, const Body& body) const {
    for (uint32_t first = begin; first < end && first < n_; first += 4) {
      const uint32_t four = shared_->levels.words[first / 4];
      if (sparse_ && four == zeros_) continue;
      for (uint32_t i = 0; i < 4 && first + i < n_; ++i) {
        const uint32_t level = four >> 8 * i & 0xffu;
        if (!sparse_ || level != (zeros_ & 0xffu)) body(first + i, level);
      }
    }
  }

  const EliasShared* shared_;
  uint32_t n_;
  uint32_t zeros_;
  bool sparse_;
};

__device__ inline void list_codes(int32_t levels, LevelCoder coder, EliasShared& shared) {
  const int32_t level = static_cast<int32_t>(threadIdx.x) - levels;
  static_assert(kThreads == 256 && kListedDistances == kThreads);
  if (level <= levels) {
    shared.of_level[threadIdx.x] =
        pack_code(coder == LevelCoder::kDense ? dense_level_code(level) : sparse_level_code(level));
  }
  shared.of_distance[threadIdx.x] = pack_code(elias_code(threadIdx.x));
  if (threadIdx.x == 0) shared.last = 0;
  __syncthreads();
}

// Counts the bits of all codes of a chunk.
__device__ inline uint32_t count_bits(const LevelReader& reader, EliasShared& shared) {
  constexpr uint32_t kEach = kChunkValues / kThreads;
  const uint32_t begin = threadIdx.x * kEach;
  const uint32_t own_last = reader.last_in(begin, begin + kEach);
  const uint32_t before = block_exclusive_max(own_last, shared.shared);
  uint32_t bits = 0;
  reader.for_each_code(begin, begin + kEach, before, [&](uint32_t code) { bits += code >> 24; });
  if (reader.sparse() && threadIdx.x + 1 == kThreads) {
    bits += reader.end_code(max(before, own_last)) >> 24;
  }
  return block_sum(bits, shared.shared);
}

// Writes a code into a row that is 0 there.
__device__ inline void put_code(uint32_t* row, uint32_t at, uint32_t code) {
  const uint32_t end = at % 32 + (code >> 24);
  const uint64_t bits = static_cast<uint64_t>(code & 0xffffffu) << (64 - end);
  atomicOr(&row[at / 32], static_cast<uint32_t>(bits >> 32));
  if (end > 32) atomicOr(&row[at / 32 + 1], static_cast<uint32_t>(bits));
}

// Writes the codes of a chunk.
__device__ inline void write_codes(const LevelReader& reader, uint32_t n, EliasShared& shared,
                                   uint8_t* out) {
  uint32_t carried = 0;  // bits of the unfinished byte before a row
  uint32_t partial = 0;  // these bits, in the highest places
  for (uint32_t base = 0; base < n; base += kRowValues) {
    for (uint32_t i = threadIdx.x; i < kRowWords; i += kThreads) {
      shared.row[i] = i == 0 ? partial : 0;
    }
    const uint32_t begin = base + 8 * threadIdx.x;
    const uint32_t own_last = reader.last_in(begin, begin + 8);
    const uint32_t before = max(block_exclusive_max(own_last, shared.shared), shared.last);
    const bool ends = reader.sparse() && base + kRowValues >= n && threadIdx.x + 1 == kThreads;
    uint32_t bits = 0;
    reader.for_each_code(begin, begin + 8, before, [&](uint32_t code) { bits += code >> 24; });
    const uint32_t end_code = ends ? reader.end_code(max(before, own_last)) : 0;
    bits += end_code >> 24;
    uint32_t total = 0;
    uint32_t at = carried + block_exclusive_sum(bits, shared.shared, total);
    reader.for_each_code(begin, begin + 8, before, [&](uint32_t code) {
      put_code(shared.row, at, code);
      at += code >> 24;
    });
    if (ends) put_code(shared.row, at, end_code);
    if (threadIdx.x + 1 == kThreads) shared.last = max(before, own_last);
    __syncthreads();
    const uint32_t all = carried + total;
    const uint32_t bytes = base + kRowValues < n ? all / 8 : (all + 7) / 8;
    for (uint32_t i = threadIdx.x; i < bytes; i += kThreads) {
      out[i] = static_cast<uint8_t>(shared.row[i / 4] >> (24 - 8 * (i % 4)));
    }
    out += bytes;
    carried = all % 8;
    partial = shared.row[all / 32] << (all % 32 - carried);
    __syncthreads();
  }
}

static GW_KERNEL void encode_elias_levels(Segments segments, Encoding encoding,
                                          QsgdParameters parameters, const LevelStep* steps) {
  __shared__ EliasShared shared;
  const Chunk chunk = Chunk::create(segments, take_ticket(encoding.ticket));
  if (!quantize_chunk(chunk, parameters.levels, encoding, steps, shared.levels)) return;
  list_codes(parameters.levels, parameters.coder, shared);
  const LevelReader reader(shared, chunk.n, parameters.levels, parameters.coder);
  const uint32_t size = (count_bits(reader, shared) + 7) / 8;
  write_codes(reader, chunk.n, shared, place(encoding, chunk, size));
}

}  // namespace gradwire::cuda
