#pragma once

// From few values and where they stand to all (spec/format.md, topk). Any bytes are safe.

#include <cstdint>

#include "cuda/coded_chunks.cuh"
#include "cuda/gap_reader.cuh"
#include "cuda/sent_values.cuh"
#include "cuda/unaligned.cuh"

namespace gradwire::cuda {

struct SparseLayout {
  SentAs sent_as;
  IndexCoder coder;

  __device__ static uint64_t head(const Segment&) { return 0; }
  __device__ uint32_t room(uint32_t n) const {
    const auto rice = static_cast<uint32_t>(kIndexSizeBytes + packed_size(n));
    return (coder == IndexCoder::kRice ? rice : (n + 7) / 8) + n * width_of(sent_as);
  }
  __device__ uint32_t least(uint32_t n) const {
    return coder == IndexCoder::kRice ? static_cast<uint32_t>(kIndexSizeBytes) : (n + 7) / 8;
  }
  __device__ static uint64_t extra() { return 1; }  // one value at least
  __device__ static bool varying() { return true; }
  __device__ static bool empty_is_zeros() { return true; }
};

// The bits of a map. false: one behind the last value is set.
__device__ inline bool read_map(const uint8_t* bytes, uint32_t n, TritWords& trits,
                                BlockShared& shared) {
  auto* map = reinterpret_cast<uint8_t*>(trits.plus);
  uint32_t wrong = 0;
  for (uint32_t i = threadIdx.x; i < (n + 31) / 32 * 4; i += kThreads) {
    map[i] = i < (n + 7) / 8 ? bytes[i] : 0;
    if (i == n / 8) wrong |= static_cast<uint32_t>(map[i]) >> n % 8;
  }
  return block_max(wrong, shared) == 0;
}

// Five trits of each byte, onto zeros. A byte that is none, and trits behind the last, are wrong.
__device__ inline uint32_t unpack_five(const uint8_t* bytes, uint32_t n, TritWords& trits) {
  uint32_t wrong = 0;
  for (uint32_t i = threadIdx.x; i < packed_size(n); i += kThreads) {
    wrong |= bytes[i] > kLargestPackedByte;
    if (bytes[i] > kLargestPackedByte || bytes[i] == kZeroByte) continue;
    for (int place = 0; place < kTritsPerByte; ++place) {
      const int trit = trit_at(bytes[i], place);
      const uint32_t at = i * kTritsPerByte + static_cast<uint32_t>(place);
      if (trit == 0) continue;
      wrong |= at >= n;
      if (at < n) atomicOr(&(trit > 0 ? trits.plus : trits.minus)[at / 32], 1u << at % 32);
    }
  }
  return wrong;
}

// Gaps in Golomb-Rice code. false: they stand for no n values, or for some -1.
__device__ inline bool read_gap_index(const uint8_t* bytes, uint32_t size, uint32_t n,
                                      TritWords& trits, BlockShared& shared) {
  for (uint32_t i = threadIdx.x; i <= kChunkWords; i += kThreads) {
    trits.plus[i] = 0;
    trits.minus[i] = 0;
  }
  __syncthreads();
  const auto packed = static_cast<uint32_t>(packed_size(n));
  uint32_t wrong = size > packed;
  if (size == packed) wrong |= unpack_five(bytes, n, trits);
  if (size < packed && threadIdx.x == 0) wrong |= !read_gaps(bytes, size, n, trits);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kChunkWords; i += kThreads) wrong |= trits.minus[i];
  return block_max(wrong, shared) == 0;
}

static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    decode_large(Segments segments, const uint8_t* payloads, SentAs sent_as, IndexCoder coder,
                 float* out, DecodeMode mode, DecodedSegment* decoded, CodedChunks chunks) {
  __shared__ SentValues sent;
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const uint64_t begin = chunks.begin[blockIdx.x];
  if (begin == kUncoded) return skip_chunk(chunk, decoded[chunk.index], out, mode);
  const uint8_t* bytes = payloads + begin;
  const uint32_t size = chunks.size[blockIdx.x];
  const uint32_t n = chunk.n;
  uint32_t index_size = 0;
  bool valid = false;
  if (coder == IndexCoder::kBitmap) {
    index_size = (n + 7) / 8;
    valid = size >= index_size && read_map(bytes, n, sent.trits, shared);
  } else if (size >= kIndexSizeBytes) {
    const uint32_t coded_size = bytes[0] | static_cast<uint32_t>(bytes[1]) << 8;
    index_size = static_cast<uint32_t>(kIndexSizeBytes) + coded_size;
    valid = index_size <= size &&
            read_gap_index(bytes + kIndexSizeBytes, coded_size, n, sent.trits, shared);
  }
  const uint32_t width = width_of(sent_as);
  if (valid) {
    count_sent(n, sent, shared);
    valid = size == index_size + sent.count * width;
  }
  if (!valid) {
    if (threadIdx.x == 0) decoded[chunk.index].valid = 0;
    return;
  }
  const uint8_t* from = bytes + index_size;
  for_each_value(n, sent, [&](uint32_t at, bool is_sent, uint32_t rank) {
    float& value = out[chunk.begin + at];
    if (!is_sent) {
      if (mode == DecodeMode::kStore) value = 0.0f;
      return;
    }
    const uint8_t* sent_at = from + rank * width;
    const float taken =
        float_of(sent_as == SentAs::kFloat32 ? load_word<uint32_t>(sent_at)
                                             : static_cast<uint32_t>(sent_at[0]) << 16 |
                                                   static_cast<uint32_t>(sent_at[1]) << 24);
    value = (mode == DecodeMode::kStore ? 0.0f : value) + taken;
  });
}

}  // namespace gradwire::cuda
