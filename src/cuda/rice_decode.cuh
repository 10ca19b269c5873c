#pragma once

// Golomb-Rice coded chunks (spec/format.md, Coder rice). A code begins where the one before ends,
// so one lane reads a chunk; what can be had is many chunks at once. Neighbouring lanes of a
// block's first warp read a chunk each, tile by tile, while the other warps store or add the values
// of the tile before.

#include <cstdint>

#include "cuda/sums.cuh"
#include "cuda/ternary_decode.cuh"
#include "cuda/ternary_values.cuh"
#include "stages/rice.h"

namespace gradwire::cuda {

// Chunks that a block reads at most. Few are better where there are few: the lanes of a warp wait
// for each other.
inline constexpr uint32_t kMostRead = 16;
// Blocks for which each reads more than one.
inline constexpr uint32_t kBlocksWanted = 512;

inline uint32_t chunks_a_block(uint32_t chunks) {
  const uint32_t wanted = chunks / kBlocksWanted + 1;
  return wanted < kMostRead ? wanted : kMostRead;
}

// Bits, the first the lowest, read in words that are aligned and lie within the bytes, one ahead.
class BitReader {
 public:
  __device__ BitReader(const uint8_t* bytes, uint32_t size)
      : skew_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(bytes) % 4)),
        end_(skew_ + size),
        words_(bytes - skew_),
        at_hand_(uint64_t{word(0)} >> 8 * skew_),
        count_(32 - 8 * skew_),
        ahead_(word(1)),
        left_(8 * size) {}

  // The next 32 bits, zeros behind the end.
  __device__ uint32_t peek() {
    if (count_ < 32) {
      at_hand_ |= uint64_t{ahead_} << count_;
      count_ += 32;
      ahead_ = word(next_++);
    }
    return static_cast<uint32_t>(at_hand_);
  }
  // Behind peek; at most 32.
  __device__ void skip(uint32_t bits) {
    at_hand_ >>= bits;
    count_ -= bits;
    left_ -= bits;
  }
  __device__ uint32_t left() const { return left_; }

 private:
  __device__ uint32_t word(uint32_t index) const {
    const uint32_t first = 4 * index;
    if (first >= skew_ && first + 4 <= end_) {
      return *reinterpret_cast<const uint32_t*>(words_ + first);
    }
    uint32_t some = 0;
    for (uint32_t i = 0; i < 4; ++i) {
      if (first + i >= skew_ && first + i < end_) some |= uint32_t{words_[first + i]} << 8 * i;
    }
    return some;
  }

  uint32_t skew_;
  uint32_t end_;
  const uint8_t* words_;  // aligned; the bytes begin `skew_` behind
  uint64_t at_hand_;
  uint32_t count_;
  uint32_t ahead_;
  uint32_t next_ = 2;
  uint32_t left_;  // bits in all
};

// The non-zeros of a chunk, one behind the other.
class GapReader {
 public:
  __device__ GapReader(const uint8_t* bytes, uint32_t size, uint32_t n)
      : bits_(bytes, size), n_(n) {
    read();
  }

  // Sets the bits of the trits in front of value `end`; those of `begin` are in the first words.
  __device__ void read_until(uint32_t begin, uint32_t end, uint32_t* plus, uint32_t* minus) {
    while (at_ < end) {
      uint32_t* const signs = negative_ ? minus : plus;  // GCC 12 errs on (? :)[] under sanitizers
      atomicOr(&signs[(at_ - begin) / 32], 1u << (at_ - begin) % 32);
      read();
    }
  }
  // The bytes stand for no n trits.
  __device__ bool wrong() const { return wrong_; }

 private:
  static constexpr uint32_t kNoMore = UINT32_MAX;

  __device__ void read() {
    uint32_t bits = bits_.peek();
    // Only padding is left.
    const bool ended = bits_.left() < kRicePadding && bits == 0;
    if (!ended && in_group_ == 0) {
      if (bits_.left() < kRiceHeadBits) return fail();
      k_ = bits & (kRiceChoices - 1);
      bits_.skip(kRiceHeadBits);
      in_group_ = kRiceGroup;
      bits = bits_.peek();
    }
    if (ended) {
      at_ = kNoMore;
      return;
    }
    --in_group_;
    const int zeros = bits == 0 ? kRiceEscape : __ffs(static_cast<int>(bits)) - 1;
    const bool escaped = zeros >= kRiceEscape;
    const uint32_t length = escaped ? kRiceLongestCode : static_cast<uint32_t>(zeros) + 2 + k_;
    const uint32_t at_sign = escaped ? kRiceEscape : static_cast<uint32_t>(zeros) + 1;
    const uint32_t rest = bits >> at_sign >> 1;
    const uint32_t gap =
        escaped ? rest & 0xffffu : (static_cast<uint32_t>(zeros) << k_) + (rest & ((1u << k_) - 1));
    if (bits_.left() < length || gap >= n_ - next_) return fail();
    bits_.skip(length);
    negative_ = (bits >> at_sign & 1) != 0;
    at_ = next_ + gap;
    next_ = at_ + 1;
  }

  __device__ void fail() {
    wrong_ = true;
    at_ = kNoMore;
  }

  BitReader bits_;
  uint32_t n_;
  uint32_t k_ = 0;
  uint32_t in_group_ = 0;  // non-zeros that are left of the group
  uint32_t at_ = 0;        // of the next non-zero, or kNoMore
  uint32_t next_ = 0;      // value behind it
  bool negative_ = false;
  bool wrong_ = false;
};

struct TritTile {
  uint32_t plus[kTileValues / 32];
  uint32_t minus[kTileValues / 32];
};

// `each` chunks a block. Those that are not in Golomb-Rice code are decode_ternary's.
static __global__ void __launch_bounds__(kThreads, 3)
    decode_rice(Segments segments, const uint8_t* payloads, const PayloadPlace* places,
                uint32_t each, float* out, DecodeMode mode, DecodedSegment* decoded,
                DecodeScratch scratch) {
  __shared__ TritTile tiles[2][kMostRead];
  static_assert(kTileValues % 32 == 0 && kLanes % kMostRead == 0);
  const uint32_t first_chunk = blockIdx.x * each;
  const uint32_t count = min(each, segments.chunks - first_chunk);
  const auto is_coded = [&](uint32_t chunk, uint32_t n) {
    return scratch.begin[chunk] != kNoChunk && scratch.size[chunk] < packed_size(n);
  };
  uint32_t most = 0;  // values of a chunk
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t n = Chunk::create(segments, first_chunk + i).n;
    if (is_coded(first_chunk + i, n)) most = max(most, n);
  }
  if (most == 0) return;

  const uint32_t read_chunk = first_chunk + min(threadIdx.x, count - 1);
  const Chunk read = Chunk::create(segments, read_chunk);
  const bool reads = threadIdx.x < count && is_coded(read_chunk, read.n);
  GapReader reader(payloads + (reads ? scratch.begin[read_chunk] : 0),
                   reads ? scratch.size[read_chunk] : 0, read.n);
  for (uint32_t first = 0; first < most + kTileValues; first += kTileValues) {
    const uint32_t turn = first / kTileValues;
    if (warp() == 0) {
      TritTile* filled = tiles[turn % 2];
      auto* words = reinterpret_cast<uint32_t*>(filled);
      for (uint32_t i = lane(); i < count * sizeof(TritTile) / 4; i += kLanes) words[i] = 0;
      __syncwarp();
      if (reads) {
        reader.read_until(first, first + kTileValues, filled[lane()].plus, filled[lane()].minus);
      }
    } else if (first > 0) {
      const uint32_t before = first - kTileValues;
      for (uint32_t i = 0; i < count; ++i) {
        const Chunk chunk = Chunk::create(segments, first_chunk + i);
        if (before >= chunk.n || !is_coded(first_chunk + i, chunk.n)) continue;
        const TritTile& tile = tiles[(turn - 1) % 2][i];
        const TernaryValues values(chunk, payloads + places[chunk.index].begin, out, mode);
        values.put<kLoaders>(before + threadIdx.x - kLanes, [&](uint32_t at) {
          const uint32_t word = (at - before) / 32;
          return static_cast<int>(tile.plus[word] >> at % 32 & 1) -
                 static_cast<int>(tile.minus[word] >> at % 32 & 1);
        });
      }
    }
    __syncthreads();
  }
  if (reads && reader.wrong()) decoded[read.index].valid = 0;
}

}  // namespace gradwire::cuda
