#pragma once

// The arguments of the kernels of a call that encodes.

#include <algorithm>
#include <cstdint>

#include "cuda/common/codec_kernels.h"
#include "cuda/common/input.cuh"
#include "stages/element/float_bits.h"

namespace gradwire::cuda {

// Bits of the largest magnitudes, which the first pass finds; 0 before.
struct Magnitudes {
  uint32_t* of_scale;  // of each scale's group; nullptr: they are not needed
  uint32_t* of_segment;
};

struct Encoding {
  Input input;
  DrawContext draw;
  uint8_t* payloads;
  EncodedSegment* encoded;
  Magnitudes magnitudes;
  uint64_t places_count;
  uint64_t* places;  // of each chunk, or tile of a chunk, whose size varies (chunk_places.cuh)
  uint32_t* ticket;

  // Takes its scratch memory, and queues the kernel that clears it. scales: 0 where only the
  // segments' magnitudes are needed.
  Encoding(Call& call, const EncodeArguments& arguments, uint64_t scales, uint64_t its_places);

  // Whether the chunk's segment has magnitude bits of at least `limit`. If so, reports the first
  // such value; the segment is not encoded. The whole block calls it.
  __device__ bool refuse(const Chunk& chunk, uint32_t limit) const {
    if (magnitudes.of_segment[chunk.index] < limit) return false;
    input.for_each(chunk.begin, chunk.n, [&](uint32_t at, float b) {
      if (at < chunk.n && magnitude_bits(b) >= limit) {
        atomicMin(reinterpret_cast<unsigned long long*>(&encoded[chunk.index].non_finite),
                  static_cast<unsigned long long>(chunk.first + at));
      }
    });
    return true;
  }
  __device__ uint8_t* payload(const Chunk& chunk) const { return payloads + chunk.segment.payload; }
};

static GW_KERNEL void clear_encoding(Segments segments, Encoding encoding) {
  const uint64_t i = thread_number();
  if (i < segments.count) {
    encoding.encoded[i] = {0, EncodedSegment::kFinite};
    encoding.magnitudes.of_segment[i] = 0;
  }
  if (encoding.magnitudes.of_scale != nullptr && i < segments.scales) {
    encoding.magnitudes.of_scale[i] = 0;
  }
  if (i < encoding.places_count) encoding.places[i] = 0;
  if (i == 0) *encoding.ticket = 0;
}

inline Encoding::Encoding(Call& call, const EncodeArguments& arguments, uint64_t scales,
                          uint64_t its_places)
    : input(arguments),
      draw(arguments.draw),
      payloads(reinterpret_cast<uint8_t*>(arguments.payloads_dev)),
      encoded(arguments.encoded_dev),
      magnitudes{.of_scale = scales == 0 ? nullptr : call.take<uint32_t>(scales),
                 .of_segment = call.take<uint32_t>(call.segments.count)},
      places_count(its_places),
      places(call.take<uint64_t>(its_places)),
      ticket(call.take<uint32_t>(1)) {
  const uint64_t cleared = std::max<uint64_t>({call.segments.count, scales, places_count, 1});
  call.launch(clear_encoding, blocks_for(cleared), *this);
}

}  // namespace gradwire::cuda
