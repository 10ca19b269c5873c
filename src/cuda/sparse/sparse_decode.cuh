#pragma once

// Decodes values and their places to a chunk (spec/format.md, topk). Any bytes are safe.

#include <cstdint>

#include "cuda/coded/coded_decode.cuh"
#include "cuda/sparse/sent_values.cuh"
#include "cuda/ternary/gap_reader.cuh"
#include "stages/element/bfloat16.h"

namespace gradwire::cuda {

// Reads the bits of a map. false: one is set after the last value.
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

// Unpacks five trits from each byte, onto zeros. Bytes that hold no five trits, and trits after the
// last value, are wrong.
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

// Reads gaps in Golomb-Rice code. false: they do not stand for n trits of 0 or +1.
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
  if (size < packed && threadIdx.x == 0) {
    GapReader reader(bytes, size, n);
    reader.read_until(0, n, trits.plus, trits.minus);
    wrong |= reader.wrong();
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kChunkWords; i += kThreads) wrong |= trits.minus[i];
  return block_max(wrong, shared) == 0;
}

static GW_KERNEL void decode_large(Segments segments, Decoding decoding,
                                   TopkParameters parameters) {
  __shared__ SentValues sent;
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const uint8_t* bytes = decoding.bytes_of(chunk);
  if (bytes == nullptr) return;
  const uint32_t size = decoding.size[chunk.number];
  const uint32_t n = chunk.n;
  uint32_t index_size = 0;
  bool valid = false;
  if (parameters.index == IndexCoder::kBitmap) {
    index_size = (n + 7) / 8;
    valid = size >= index_size && read_map(bytes, n, sent.trits, shared);
  } else if (size >= kIndexSizeBytes) {
    const uint32_t coded_size = load_word<uint16_t>(bytes);
    index_size = static_cast<uint32_t>(kIndexSizeBytes) + coded_size;
    valid = index_size <= size &&
            read_gap_index(bytes + kIndexSizeBytes, coded_size, n, sent.trits, shared);
  }
  const uint32_t width = width_of(parameters.values);
  if (valid) {
    count_sent(n, sent, shared);
    valid = size == index_size + sent.count * width;
  }
  if (!valid) {
    if (threadIdx.x == 0) decoding.refuse(chunk);
    return;
  }
  const bool stores = decoding.mode == DecodeMode::kStore;
  const uint8_t* from = bytes + index_size;
  for_each_value(n, sent, [&](uint32_t at, bool is_sent, uint32_t rank) {
    float& value = decoding.out[chunk.begin + at];
    if (!is_sent) {
      if (stores) value = 0.0f;
      return;
    }
    const uint8_t* sent_at = from + rank * width;
    const float taken = parameters.values == SentAs::kFloat32
                            ? float_of(load_word<uint32_t>(sent_at))
                            : widen_bf16(load_word<uint16_t>(sent_at));
    value = stores ? taken : value + taken;
  });
}

}  // namespace gradwire::cuda
