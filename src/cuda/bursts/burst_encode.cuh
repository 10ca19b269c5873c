#pragma once

// Shortened floats, in bursts of eight (spec/format.md, inceptionn). Each block handles one tile of
// a chunk: it codes the tile in shared memory, and then finds its place after the tiles before it.

#include <cstdint>

#include "cuda/coded/chunk_places.cuh"
#include "cuda/common/magnitudes.cuh"
#include "stages/float_clip/float_clip.h"

namespace gradwire::cuda {

inline constexpr uint32_t kStepValues = kUnrolled * kThreads;
inline constexpr uint32_t kStepRows = kStepValues / kLanes;
inline constexpr uint32_t kRowBursts = kLanes / kBurstValues;
inline constexpr uint32_t kBurstTileValues = 4 * kStepValues;
inline constexpr uint32_t kTiles = kChunkValues / kBurstTileValues;  // of a chunk
static_assert(kTiles * kBurstTileValues == kChunkValues && kStepRows * kRowBursts == kThreads);

// The tags of 32 values, which make a row: their lower and their upper bits.
struct TagRow {
  uint32_t low;
  uint32_t high;

  // Bytes of the codes before a lane's code, without tags.
  __device__ uint32_t codes_before(unsigned at) const {
    const uint32_t before = at >= 32 ? ~0u : (1u << at) - 1;
    return static_cast<uint32_t>(__popc(low & before) + 2 * __popc(high & before) +
                                 __popc(low & high & before));
  }
  // The tags of the eight values from `at` on, in the order of a burst.
  __device__ uint32_t of_burst(unsigned at) const {
    return spread_eight(low >> at & 0xffu) | spread_eight(high >> at & 0xffu) << 1;
  }

 private:
  __device__ static uint32_t spread_eight(uint32_t bits) {
    bits = (bits | bits << 4) & 0x0f0fu;
    bits = (bits | bits << 2) & 0x3333u;
    return (bits | bits << 1) & 0x5555u;
  }
};

// The shared memory of a block.
struct BurstTile {
  uint32_t words[kBurstTileValues / kBurstValues * kMaxBurstSize / 4 + 1];
  TagRow tags[kStepRows];
  uint32_t starts[kStepRows];  // of the rows, in words
  BlockShared shared;
};

// Codes the n values from `begin` on, at most kStepValues, and puts them at byte `end` of the tile.
// Returns how many bytes they take.
__device__ inline uint32_t code_step(const Input& input, uint64_t begin, uint32_t n,
                                     const FloatClip& clip, uint32_t end, BurstTile& tile) {
  uint32_t codes[kUnrolled];
  input.replace(
      begin, n, [](uint32_t) {},
      [&](uint32_t i, uint32_t at, float b) {
        const uint32_t tag = at < n ? clip_tag(b, clip) : kClipNone;
        codes[i] = clip_code(b, tag);
        const TagRow row = {__ballot_sync(kAllLanes, static_cast<int>(tag & 1)),
                            __ballot_sync(kAllLanes, static_cast<int>(tag >> 1))};
        if (lane() == 0) tile.tags[at / kLanes] = row;
        return input.keeps_residual() ? b - clip_value(tag, codes[i]) : 0.0f;
      });
  __syncthreads();
  uint32_t size = 0;
  if (threadIdx.x < kStepRows && threadIdx.x * kLanes < n) {
    const uint32_t values = min(kLanes, n - threadIdx.x * kLanes);
    const auto bursts = static_cast<uint32_t>((values + kBurstValues - 1) / kBurstValues);
    size = static_cast<uint32_t>(kBurstTagBytes) * bursts +
           tile.tags[threadIdx.x].codes_before(kLanes);
  }
  uint32_t total = 0;
  const uint32_t before = block_exclusive_sum(size, tile.shared, total);
  if (threadIdx.x < kStepRows) tile.starts[threadIdx.x] = end + before;
  __syncthreads();

  auto* out = reinterpret_cast<uint8_t*>(tile.words);
  const auto place_of = [&](uint32_t row, unsigned at) {
    return tile.starts[row] + static_cast<uint32_t>(kBurstTagBytes * (at / kBurstValues + 1)) +
           tile.tags[row].codes_before(at);
  };
  // Each burst's tags are written by one thread, and each value's code by one thread.
  if (threadIdx.x * kBurstValues < n) {
    const uint32_t row = threadIdx.x / kRowBursts;
    const auto at = static_cast<unsigned>(threadIdx.x % kRowBursts * kBurstValues);
    const uint32_t tags = tile.tags[row].of_burst(at);
    uint8_t* to = out + place_of(row, at) - kBurstTagBytes;
    to[0] = static_cast<uint8_t>(tags);
    to[1] = static_cast<uint8_t>(tags >> 8);
  }
#pragma unroll
  for (uint32_t i = 0; i < kUnrolled; ++i) {
    const uint32_t row = i * kWarps + warp();
    const uint32_t tag = (tile.tags[row].low >> lane() & 1) | (tile.tags[row].high >> lane() & 1)
                                                                  << 1;
    if (tag == kClipNone) continue;
    uint8_t* to = out + place_of(row, lane());
    for (uint32_t byte = 0; byte < clip_size(tag); ++byte) {
      to[byte] = static_cast<uint8_t>(codes[i] >> 8 * byte);
    }
  }
  __syncthreads();
  return total;
}

static GW_KERNEL void encode_bursts(Segments segments, Encoding encoding, FloatClip clip) {
  __shared__ BurstTile tile;
  const uint32_t number = take_ticket(encoding.ticket);
  const Chunk chunk = Chunk::create(segments, number / kTiles);
  const uint32_t first = number % kTiles * kBurstTileValues;
  if (first >= chunk.n) return;
  if (encoding.magnitudes.of_segment[chunk.index] >= kNonFiniteBits) {
    if (first == 0) encoding.refuse(chunk, kNonFiniteBits);
    return;
  }
  const uint32_t n = min(kBurstTileValues, chunk.n - first);
  uint32_t size = 0;
  for (uint32_t at = 0; at < n; at += kStepValues) {
    size += code_step(encoding.input, chunk.begin + first + at, min(kStepValues, n - at), clip,
                      size, tile);
  }
  const uint64_t place =
      place_chunk(&encoding.places[number], chunk.of_segment * kTiles + number % kTiles, size);
  copy_out(tile.words, size, encoding.payload(chunk) + chunk.segment.chunks_at() + place);
}

// Writes the sizes of chunks and payloads, from where the tiles end; each thread handles one chunk.
static GW_KERNEL void write_burst_sizes(Segments segments, Encoding encoding) {
  const uint64_t number = thread_number();
  if (number >= segments.chunks) return;
  const Chunk chunk = Chunk::create(segments, static_cast<uint32_t>(number));
  if (encoding.magnitudes.of_segment[chunk.index] >= kNonFiniteBits) return;
  const uint64_t* ends = encoding.places + number * kTiles;
  const uint64_t begin = chunk.of_segment == 0 ? 0 : ends[-1] & kBytesMask;
  const uint64_t end = ends[(chunk.n - 1) / kBurstTileValues] & kBytesMask;
  write_size(encoding, chunk, begin, static_cast<uint32_t>(end - begin));
}

}  // namespace gradwire::cuda
