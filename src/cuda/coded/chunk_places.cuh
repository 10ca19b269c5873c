#pragma once

// Where each chunk's bytes go: after those of the chunks before it in its segment, whose sizes
// other blocks find at the same time. Decoupled look-back (Merrill and Garland, Single-pass
// parallel prefix scan with decoupled look-back, NVIDIA 2016): a block first publishes its chunk's
// size, then adds up what the blocks before it have published, back to one that knows where its
// chunk ends, and then publishes the end of its own. So coded bytes are written once, to their
// place. The alternative, fixed places and a pass that moves the bytes together, reads and writes
// them all again.

#include <cstdint>

#include "cuda/common/block.cuh"
#include "cuda/common/encoding.cuh"

namespace gradwire::cuda {

// One word for each chunk, 0 before the kernel begins: the upper two bits say what is published,
// the others are bytes. All that a block learns from another is in this word, which is read and
// written at once, so no fence is needed; volatile, so that each read goes to memory.
inline constexpr uint64_t kSizePublished = uint64_t{1} << 62;
inline constexpr uint64_t kEndPublished = uint64_t{2} << 62;
inline constexpr uint64_t kBytesMask = kSizePublished - 1;

__device__ inline uint64_t read_published(const uint64_t* word) {
  return *static_cast<const volatile uint64_t*>(word);
}

__device__ inline void publish(uint64_t* word, uint64_t value) {
  *static_cast<volatile uint64_t*>(word) = value;
}

// A number for each block, in the order in which blocks begin to run, so that a block waits only
// for blocks that run already. `ticket` is 0 before the kernel begins.
__device__ inline uint32_t take_ticket(uint32_t* ticket) {
  __shared__ uint32_t taken;
  if (threadIdx.x == 0) taken = atomicAdd(ticket, 1u);
  __syncthreads();
  return taken;
}

// Where a chunk of `size` bytes begins, counted from the begin of its segment's first chunk; the
// chunk is the index-th of its segment, and `word` is its own. Every thread gets the result.
__device__ inline uint64_t place_chunk(uint64_t* word, uint32_t index, uint32_t size) {
  __shared__ uint64_t begin;
  if (warp() == 0) {
    uint64_t before = 0;
    if (index > 0) {
      if (lane() == 0) publish(word, kSizePublished | size);
      // 32 chunks at a time, the nearest in lane 0.
      for (uint32_t nearest = 1;; nearest += kLanes) {
        const uint32_t back = nearest + lane();
        uint64_t other = kEndPublished;  // before the segment
        if (back <= index) {
          for (other = read_published(word - back); other == 0;
               other = read_published(word - back)) {
            wait_a_little();
          }
        }
        const unsigned ends = __ballot_sync(kAllLanes, (other & kEndPublished) != 0);
        const unsigned last =
            ends == 0 ? kLanes - 1 : static_cast<unsigned>(__ffs(static_cast<int>(ends))) - 1;
        uint64_t bytes = lane() <= last ? other & kBytesMask : 0;
        for (unsigned step = kLanes / 2; step > 0; step /= 2) {
          bytes += __shfl_xor_sync(kAllLanes, bytes, static_cast<int>(step));
        }
        before += bytes;
        if (ends != 0) break;
      }
    }
    if (lane() == 0) {
      publish(word, kEndPublished | (before + size));
      begin = before;
    }
  }
  __syncthreads();
  return begin;
}

// Writes the size of a chunk, and that of the payload after the last chunk. One thread calls it.
__device__ inline void write_size(const Encoding& encoding, const Chunk& chunk, uint64_t begin,
                                  uint32_t size) {
  const Segment& segment = chunk.segment;
  uint8_t* listed = encoding.payload(chunk) + segment.scales_size +
                    uint64_t{segment.size_width} * chunk.of_segment;
  for (uint32_t i = 0; i < segment.size_width; ++i) listed[i] = static_cast<uint8_t>(size >> 8 * i);
  if (chunk.of_segment + 1 == segment.chunks) {
    encoding.encoded[chunk.index].size = segment.chunks_at() + begin + size;
  }
}

// Finds the place of a chunk's coded bytes in its payload, and writes its size. Returns the place.
// The whole block calls it.
__device__ inline uint8_t* place(const Encoding& encoding, const Chunk& chunk, uint32_t size) {
  const uint64_t begin = place_chunk(&encoding.places[chunk.number], chunk.of_segment, size);
  if (threadIdx.x == 0) write_size(encoding, chunk, begin, size);
  return encoding.payload(chunk) + chunk.segment.chunks_at() + begin;
}

// Copies `size` bytes from shared memory to any address; one word after them may be read.
__device__ inline void copy_out(const uint32_t* words, uint32_t size, uint8_t* out) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  const auto skew = static_cast<uint32_t>((4 - reinterpret_cast<uintptr_t>(out) % 4) % 4);
  const uint32_t head = skew < size ? skew : size;
  const uint32_t body = (size - head) / 4;
  auto* out_words = reinterpret_cast<uint32_t*>(out + head);
  for (uint32_t i = threadIdx.x; i < body; i += kThreads) {
    const uint64_t both = static_cast<uint64_t>(words[i]) |
                          (head == 0 ? 0 : static_cast<uint64_t>(words[i + 1]) << 32);
    out_words[i] = static_cast<uint32_t>(both >> 8 * head);
  }
  const uint32_t end = head + 4 * body;
  if (threadIdx.x < head) out[threadIdx.x] = bytes[threadIdx.x];
  if (threadIdx.x < size - end) out[end + threadIdx.x] = bytes[end + threadIdx.x];
}

}  // namespace gradwire::cuda
