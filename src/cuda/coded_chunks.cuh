#pragma once

// Where the chunks of received payloads lie (spec/format.md, Chunks): head, sizes of the chunks
// where they vary and there are several, chunks. A layout says what is special about a codec:
//
//   struct Layout {
//     __device__ uint64_t head(const Segment& segment) const;  // bytes in front
//     __device__ uint32_t room(uint32_t n) const;   // most bytes of a chunk of n values
//     __device__ uint32_t least(uint32_t n) const;  // fewest
//     __device__ uint64_t extra() const;            // bytes that a payload has beside the fewest
//     __device__ bool varying() const;              // false: each chunk takes its room
//     __device__ bool empty_is_zeros() const;       // what an empty payload means
//   };

#include <cstdint>

#include "cuda/block.cuh"
#include "cuda/codec_kernels.h"
#include "cuda/segments.h"
#include "cuda/unaligned.cuh"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

// Of each chunk. One that is not to be decoded begins at kUncoded.
struct CodedChunks {
  uint64_t* begin;  // in the payloads
  uint32_t* size;

  static CodedChunks take(const Segments& segments, ScratchLayout& layout) {
    return {.begin = layout.take<uint64_t>(segments.chunks),
            .size = layout.take<uint32_t>(segments.chunks)};
  }
};

inline constexpr uint64_t kUncoded = ~uint64_t{0};

// Bytes of a listed size; 0: none is listed.
template <typename Layout>
__device__ inline uint32_t size_width(const Layout& layout, const Segment& segment) {
  if (!layout.varying() || segment.chunks < 2) return 0;
  return layout.room(kChunkValues) <= UINT16_MAX ? 2 : 4;
}

// Where the chunks of a payload begin in it.
template <typename Layout>
__device__ inline uint64_t chunks_offset(const Layout& layout, const Segment& segment) {
  return layout.head(segment) + uint64_t{size_width(layout, segment)} * segment.chunks;
}

// A block a segment. A size that no chunk can have is refused here; so the sums of a row of
// kThreads sizes stay below 2^32.
template <typename Layout>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    find_coded_chunks(Segments segments, const uint8_t* payloads, const PayloadPlace* places,
                      Layout layout, DecodedSegment* decoded, CodedChunks chunks) {
  __shared__ BlockShared shared;
  const Segment segment = segments.segments[blockIdx.x];
  const PayloadPlace place = places[blockIdx.x];
  const uint32_t width = size_width(layout, segment);
  const uint64_t chunks_at = chunks_offset(layout, segment);
  const bool empty = place.size == 0 && (segment.n == 0 || layout.empty_is_zeros());
  uint64_t least = chunks_at + layout.extra();
  if (segment.chunks > 0) {
    least += (segment.chunks - 1) * uint64_t{layout.least(kChunkValues)} +
             layout.least(static_cast<uint32_t>(segment.values_of(segment.chunks - 1)));
  }
  bool valid = empty || (segment.n > 0 && place.size >= least);
  const uint8_t* sizes = payloads + place.begin + layout.head(segment);

  uint32_t wrong = 0;
  uint64_t end = chunks_at;  // of the chunks before
  for (uint32_t base = 0; base < segment.chunks; base += kThreads) {
    const uint32_t chunk = base + threadIdx.x;
    uint32_t size = 0;
    if (valid && !empty && chunk < segment.chunks) {
      const uint32_t room = layout.room(static_cast<uint32_t>(segment.values_of(chunk)));
      if (!layout.varying()) {
        size = room;
      } else if (width == 0) {
        size = place.size - chunks_at > room ? room + 1
                                             : static_cast<uint32_t>(place.size - chunks_at);
      } else {
        const uint8_t* at = sizes + uint64_t{width} * chunk;
        size = width == 4 ? load_word<uint32_t>(at) : at[0] | static_cast<uint32_t>(at[1]) << 8;
      }
      wrong |= size > room;
      if (size > room) size = 0;
    }
    uint32_t total = 0;
    const uint32_t before = block_exclusive_sum(size, shared, total);
    if (chunk < segment.chunks) {
      chunks.begin[segment.first_chunk + chunk] =
          valid && !empty ? place.begin + end + before : kUncoded;
      chunks.size[segment.first_chunk + chunk] = size;
    }
    end += total;
  }
  valid = valid && block_max(wrong, shared) == 0 && (empty || end == place.size);
  if (!valid) {
    for (uint32_t i = threadIdx.x; i < segment.chunks; i += kThreads) {
      chunks.begin[segment.first_chunk + i] = kUncoded;
    }
  }
  if (threadIdx.x == 0) decoded[blockIdx.x] = {valid ? 1u : 0u, empty ? 1u : 0u};
}

// What becomes of a chunk that is not to be decoded: its values are thread `own`'s of `threads`.
__device__ inline void skip_chunk(const Chunk& chunk, const DecodedSegment& decoded, float* out,
                                  DecodeMode mode, uint32_t own, uint32_t threads) {
  if (decoded.empty == 0 || mode == DecodeMode::kAdd) return;
  for (uint32_t at = own; at < chunk.n; at += threads) out[chunk.begin + at] = 0.0f;
}
__device__ inline void skip_chunk(const Chunk& chunk, const DecodedSegment& decoded, float* out,
                                  DecodeMode mode) {
  skip_chunk(chunk, decoded, out, mode, threadIdx.x, kThreads);
}

}  // namespace gradwire::cuda
