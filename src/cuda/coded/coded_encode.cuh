#pragma once

// Encoding to payloads whose chunks vary in size (coded_layout.cuh).

#include <algorithm>
#include <cstdint>

#include "cuda/coded/chunk_places.cuh"
#include "cuda/coded/coded_layout.cuh"
#include "cuda/common/codec_kernels.h"
#include "cuda/common/input.cuh"
#include "cuda/common/magnitudes.cuh"

namespace gradwire::cuda {

// A call that encodes.
struct Encoding {
  Input input;
  DrawContext draw;
  uint8_t* payloads;
  EncodedSegment* encoded;
  Magnitudes magnitudes;
  uint64_t places_count;
  uint64_t* places;  // one word for each chunk, or tile of a chunk (chunk_places.cuh)
  uint32_t* ticket;

  // scales: 0 where only the segments' magnitudes are needed.
  Encoding(const Segments& segments, const EncodeArguments& arguments, uint64_t scales,
           uint64_t count, ScratchLayout& scratch)
      : input(arguments),
        draw(arguments.draw),
        payloads(reinterpret_cast<uint8_t*>(arguments.payloads_dev)),
        encoded(arguments.encoded_dev),
        magnitudes{.of_scale = scales == 0 ? nullptr : scratch.take<uint32_t>(scales),
                   .of_segment = scratch.take<uint32_t>(segments.count)},
        places_count(count),
        places(scratch.take<uint64_t>(count)),
        ticket(scratch.take<uint32_t>(1)) {}

  [[nodiscard]] Status clear(const Segments& segments, cudaStream_t stream) const;

  // Whether the chunk's segment has magnitude bits of at least `limit`. Then the first value that
  // has is named, and the segment is not encoded.
  __device__ bool refuse(const Chunk& chunk, uint32_t limit) const {
    const bool refused = magnitudes.of_segment[chunk.index] >= limit;
    if (refused) name_non_finite(chunk, input, limit, encoded);
    return refused;
  }
  __device__ uint8_t* payload(const Chunk& chunk) const { return payloads + chunk.segment.payload; }

  // Writes the size of a chunk, and that of the payload after the last chunk. One thread calls it.
  template <typename Layout>
  __device__ void write_size(const Layout& layout, const Chunk& chunk, uint64_t begin,
                             uint32_t size) const {
    const Segment& segment = chunk.segment;
    const uint32_t width = size_width(layout, segment);
    uint8_t* listed =
        payload(chunk) + sizes_offset<Layout>(segment) + uint64_t{width} * chunk.of_segment;
    for (uint32_t i = 0; i < width; ++i) listed[i] = static_cast<uint8_t>(size >> 8 * i);
    if (chunk.of_segment + 1 == segment.chunks) {
      encoded[chunk.index].size = chunks_offset(layout, segment) + begin + size;
    }
  }

  // Finds the place of a chunk's coded bytes in its payload, and writes its size. Returns the
  // place. The whole block calls it.
  template <typename Layout>
  __device__ uint8_t* place(const Layout& layout, const Chunk& chunk, uint32_t number,
                            uint32_t size) const {
    const uint64_t begin = place_chunk(&places[number], chunk.of_segment, size);
    if (threadIdx.x == 0) write_size(layout, chunk, begin, size);
    return payload(chunk) + chunks_offset(layout, chunk.segment) + begin;
  }
};

// The first kernel of a call.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    clear_encoding(Segments segments, Encoding encoding) {
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  clear_at(i, segments, encoding.encoded, encoding.magnitudes);
  if (i < encoding.places_count) encoding.places[i] = 0;
  if (i == 0) *encoding.ticket = 0;
}

inline Status Encoding::clear(const Segments& segments, cudaStream_t stream) const {
  const uint64_t cleared =
      std::max<uint64_t>({segments.count, segments.scales, places_count, uint64_t{1}});
  return launch(clear_encoding, blocks_for(cleared), stream, segments, *this);
}

}  // namespace gradwire::cuda
