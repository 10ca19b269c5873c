#pragma once

// Decoding of chunks in Golomb-Rice code (spec/format.md, Coder rice). A code begins where the one
// before ends, so one lane reads a chunk, and only many chunks can be read at once. Neighbouring
// lanes of a block's first warp read a chunk each, tile by tile, while the other warps store or add
// the values of the tile before.

#include <cstdint>

#include "cuda/common/sums.cuh"
#include "cuda/ternary/gap_reader.cuh"
#include "cuda/ternary/ternary_decode.cuh"

namespace gradwire::cuda {

// A block reads at most so many chunks. Where a bucket has few chunks, a block reads few of them,
// as the lanes of a warp wait for each other.
inline constexpr uint32_t kMostRead = 16;
// A block reads more than one chunk only if there are more blocks than these.
inline constexpr uint32_t kBlocksWanted = 512;

inline uint32_t chunks_a_block(uint32_t chunks) {
  const uint32_t wanted = chunks / kBlocksWanted + 1;
  return wanted < kMostRead ? wanted : kMostRead;
}

struct TritTile {
  uint32_t plus[kTileValues / 32];
  uint32_t minus[kTileValues / 32];
};

// Each block handles `each` chunks. Chunks that are not in Golomb-Rice code are decode_ternary's.
static __global__ void __launch_bounds__(kThreads, 3)
    decode_rice(Segments segments, Decoding decoding, uint32_t each) {
  __shared__ TritTile tiles[2][kMostRead];
  static_assert(kTileValues % 32 == 0 && kLanes % kMostRead == 0);
  const uint32_t first_chunk = blockIdx.x * each;
  const uint32_t count = min(each, segments.chunks - first_chunk);
  const auto is_coded = [&](uint32_t chunk, uint32_t n) {
    return decoding.begin[chunk] != kUncoded && decoding.size[chunk] < packed_size(n);
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
  GapReader reader(decoding.bytes + (reads ? decoding.begin[read_chunk] : 0),
                   reads ? decoding.size[read_chunk] : 0, read.n);
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
        const TernaryValues values(chunk, decoding);
        values.put<kLoaders>(before + threadIdx.x - kLanes, [&](uint32_t at) {
          const uint32_t word = (at - before) / 32;
          return static_cast<int>(tile.plus[word] >> at % 32 & 1) -
                 static_cast<int>(tile.minus[word] >> at % 32 & 1);
        });
      }
    }
    __syncthreads();
  }
  if (reads && reader.wrong()) decoding.refuse(read);
}

}  // namespace gradwire::cuda
