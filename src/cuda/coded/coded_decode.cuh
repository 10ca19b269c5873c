#pragma once

// Decoding of payloads whose chunks vary in size (coded_layout.cuh). Any bytes are safe.

#include <cstdint>

#include "base/return_if_error.h"
#include "cuda/coded/coded_layout.cuh"
#include "cuda/common/block.cuh"
#include "cuda/common/codec_kernels.h"
#include "cuda/common/payloads.cuh"
#include "cuda/common/sources.cuh"
#include "cuda/common/unaligned.cuh"

namespace gradwire::cuda {

inline constexpr uint64_t kUncoded = ~uint64_t{0};

// A call that decodes one payload of each segment.
struct Decoding {
  const uint8_t* payloads;
  const PayloadPlace* places;
  float* out;
  DecodeMode mode;
  DecodedSegment* decoded;
  uint64_t* begin;      // of each chunk, in the payloads; kUncoded: it is not decoded
  uint32_t* size;       // of each chunk
  uint32_t* any_scale;  // of each segment: whether one of its scales is not 0

  Decoding(const Segments& segments, const DecodeArguments& arguments, ScratchLayout& scratch)
      : begin(scratch.take<uint64_t>(segments.chunks)),
        size(scratch.take<uint32_t>(segments.chunks)),
        any_scale(scratch.take<uint32_t>(segments.count)) {
    take(arguments);
  }
  void take(const DecodeArguments& arguments) {
    payloads = reinterpret_cast<const uint8_t*>(arguments.payloads_dev);
    places = arguments.places_dev;
    out = arguments.out_dev;
    mode = arguments.mode;
    decoded = arguments.decoded_dev;
  }

  // The bytes of a chunk, for the `threads` threads that decode it, of which this one is the
  // own-th. nullptr: nothing is left to do, as the payload is corrupt, or empty.
  __device__ const uint8_t* bytes_of(const Chunk& chunk, uint64_t number,
                                     uint32_t own = threadIdx.x,
                                     uint32_t threads = kThreads) const {
    if (begin[number] != kUncoded) return payloads + begin[number];
    if (decoded[chunk.index].empty != 0 && mode == DecodeMode::kStore) {
      for (uint32_t at = own; at < chunk.n; at += threads) out[chunk.begin + at] = 0.0f;
    }
    return nullptr;
  }
  __device__ const uint8_t* scales_of(const Chunk& chunk) const {
    return payloads + places[chunk.index].begin;
  }
  __device__ void refuse(const Chunk& chunk) const { decoded[chunk.index].valid = 0; }
};

// Finds the chunks of each payload; each block handles one segment. A size that no chunk can have
// is refused here; so the sums of kThreads sizes stay below 2^32.
template <typename Layout>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    find_coded_chunks(Segments segments, Layout layout, Decoding decoding) {
  __shared__ BlockShared shared;
  const Segment segment = segments.segments[blockIdx.x];
  const PayloadPlace place = decoding.places[blockIdx.x];
  const uint32_t width = size_width(layout, segment);
  const uint64_t chunks_at = chunks_offset(layout, segment);
  const bool empty = place.size == 0 && (segment.n == 0 || Layout::kEmptyIsZeros);
  uint64_t least = chunks_at + Layout::kExtra;
  if (segment.chunks > 0) {
    least += (segment.chunks - 1) * uint64_t{layout.least(kChunkValues)} +
             layout.least(static_cast<uint32_t>(segment.values_of(segment.chunks - 1)));
  }
  bool valid = empty || (segment.n > 0 && place.size >= least);
  const uint8_t* sizes = decoding.payloads + place.begin + sizes_offset<Layout>(segment);

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
        size = width == 4 ? load_word<uint32_t>(at) : load_word<uint16_t>(at);
      }
      wrong |= size > room;
      if (size > room) size = 0;
    }
    uint32_t total = 0;
    const uint32_t before = block_exclusive_sum(size, shared, total);
    if (chunk < segment.chunks) {
      decoding.begin[segment.first_chunk + chunk] =
          valid && !empty ? place.begin + end + before : kUncoded;
      decoding.size[segment.first_chunk + chunk] = size;
    }
    end += total;
  }
  valid = valid && block_max(wrong, shared) == 0 && (empty || end == place.size);
  if (!valid) {
    for (uint32_t i = threadIdx.x; i < segment.chunks; i += kThreads) {
      decoding.begin[segment.first_chunk + i] = kUncoded;
    }
  }
  if (threadIdx.x == 0) {
    decoding.decoded[blockIdx.x] = {valid ? 1u : 0u, empty ? 1u : 0u};
    decoding.any_scale[blockIdx.x] = 0;
  }
}

// Queues the decoding of all payloads. queue_chunks(decoding) queues the kernels that decode the
// chunks of one payload of each segment, after their places were found.
template <typename Layout, typename QueueChunks>
Status decode_coded(const Segments& segments, const DecodeArguments& arguments,
                    const Layout& layout, ScratchLayout& scratch, cudaStream_t stream,
                    const QueueChunks& queue_chunks) {
  Decoding decoding(segments, arguments, scratch);
  if (scratch.counts()) return {};
  return decode_one_by_one(segments, arguments, stream, [&](const DecodeArguments& one) -> Status {
    decoding.take(one);
    GW_RETURN_IF_ERROR(
        launch(find_coded_chunks<Layout>, segments.count, stream, segments, layout, decoding));
    if constexpr (Layout::kScaleBytes > 0) {
      GW_RETURN_IF_ERROR(
          queue_check_scales(segments, layout, Payloads(one, decoding.any_scale), stream));
    }
    return queue_chunks(decoding);
  });
}

}  // namespace gradwire::cuda
