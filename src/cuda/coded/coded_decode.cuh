#pragma once

// Decoding of payloads whose chunks vary in size (codecs/chunks.h). Any bytes are safe. Several
// payloads of a segment are decoded onto the sum one after the other, which moves 8 bytes for each
// value and payload; fixed_decode.cuh adds them all in one pass.

#include <cstdint>

#include "cuda/common/block.cuh"
#include "cuda/common/input.cuh"
#include "cuda/common/payloads.cuh"

namespace gradwire::cuda {

inline constexpr uint64_t kUncoded = ~uint64_t{0};

// One payload of each segment.
struct Decoding : Payloads {
  uint64_t* begin;  // of each chunk, in the payloads; kUncoded: it is not decoded
  uint32_t* size;   // of each chunk

  Decoding(Call& call, const DecodeArguments& arguments)
      : Payloads(call, arguments, call.segments.count),
        begin(call.take<uint64_t>(call.segments.chunks)),
        size(call.take<uint32_t>(call.segments.chunks)) {
    sources = 1;
  }

  // Returns the bytes of a chunk, which `threads` threads decode; this one has the number `own`.
  // nullptr: nothing is left to do, as the payload is corrupt or empty.
  __device__ const uint8_t* bytes_of(const Chunk& chunk, uint32_t own = threadIdx.x,
                                     uint32_t threads = kThreads) const {
    if (begin[chunk.number] != kUncoded) return bytes + begin[chunk.number];
    if (decoded[chunk.index].empty != 0 && mode == DecodeMode::kStore) {
      for (uint32_t at = own; at < chunk.n; at += threads) out[chunk.begin + at] = 0.0f;
    }
    return nullptr;
  }
  __device__ const uint8_t* scales_of(const Chunk& chunk) const {
    return bytes + places[chunk.index].begin;
  }
  __device__ void refuse(const Chunk& chunk) const { decoded[chunk.index].valid = 0; }
};

// Finds the chunks of each payload; each block handles one segment. A size that no chunk can have
// is refused here; so the sums of kThreads sizes stay below 2^32.
static GW_KERNEL void find_coded_chunks(Segments segments, Decoding decoding) {
  __shared__ BlockShared shared;
  const Segment segment = segments.segments[blockIdx.x];
  const PayloadPlace place = decoding.places[blockIdx.x];
  const uint32_t width = segment.size_width;
  const uint64_t chunks_at = segment.chunks_at();
  const bool empty = place.size == 0;
  bool valid = segment.may_have(place.size);
  const uint8_t* sizes = decoding.bytes + place.begin + segment.scales_size;

  uint32_t wrong = 0;
  uint64_t end = chunks_at;  // of the chunks before
  for (uint32_t base = 0; base < segment.chunks; base += kThreads) {
    const uint32_t chunk = base + threadIdx.x;
    uint32_t size = 0;
    if (valid && !empty && chunk < segment.chunks) {
      const uint32_t room = segment.room(chunk);
      const uint8_t* at = sizes + uint64_t{width} * chunk;
      size = width == 4   ? load_word<uint32_t>(at)
             : width == 2 ? load_word<uint16_t>(at)
                          : static_cast<uint32_t>(place.size - chunks_at);  // of the only chunk
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

static GW_KERNEL void divide_values(Segments segments, float* values, float divisor) {
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
#pragma unroll kUnrolled
  for (uint32_t at = threadIdx.x; at < chunk.n; at += kThreads) {
    values[chunk.begin + at] /= divisor;
  }
}

// Queues the decoding of all payloads. queue_chunks(decoding) queues the kernels that decode the
// chunks of one payload of each segment, after their places were found and their scales checked.
template <typename Scales, typename QueueChunks>
void decode_coded(Call& call, const DecodeArguments& arguments, const Scales& scales,
                  const QueueChunks& queue_chunks) {
  Decoding decoding(call, arguments);
  if (call.counts()) return;
  for (uint32_t source = 0; source < arguments.sources; ++source) {
    call.launch(find_coded_chunks, call.segments.count, decoding);
    queue_check_scales(call, scales, decoding);
    queue_chunks(decoding);
    decoding.places += call.segments.count;
    decoding.decoded += call.segments.count;
    decoding.mode = DecodeMode::kAdd;
  }
  if (!divides(arguments.divisor)) return;
  call.launch(divide_values, call.segments.chunks, arguments.out_dev, arguments.divisor);
}

}  // namespace gradwire::cuda
