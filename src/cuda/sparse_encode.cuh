#pragma once

// The values that reach a threshold, and where they stand (spec/format.md, topk). A block takes a
// chunk: it finds which values are sent and codes that, finds its place, and then takes those
// values from memory again, which are few.

#include <cstdint>

#include "codecs/topk/topk.h"
#include "cuda/compaction.cuh"
#include "cuda/magnitudes.cuh"
#include "cuda/sent_values.cuh"
#include "cuda/ternary_code.cuh"
#include "cuda/unaligned.cuh"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

// Scratch of a call, zeros before the first kernel but for thresholds.
struct SparseScratch {
  Magnitudes magnitudes;
  float* thresholds;  // of each segment
  uint64_t* told;     // of each chunk (compaction.cuh)
  uint32_t* ticket;
};

// Which values of a chunk reach the threshold; of the others all is residual.
__device__ inline void find_large(const Chunk& chunk, const Input& input, float threshold,
                                  SentValues& sent, BlockShared& shared) {
  input.keep_some(chunk.begin, chunk.n, [&](uint32_t, uint32_t at, float b) {
    const bool large = at < chunk.n && reaches(b, threshold);
    const uint32_t bits = __ballot_sync(kAllLanes, large ? 1 : 0);
    if (lane() == 0) {
      sent.trits.plus[at / 32] = bits;
      sent.trits.minus[at / 32] = 0;
    }
    return !large;
  });
  if (threadIdx.x == 0) {
    // Five bits of the last values may be read across the last word.
    sent.trits.plus[(chunk.n + 31) / 32] = 0;
    sent.trits.minus[(chunk.n + 31) / 32] = 0;
  }
  __syncthreads();
  count_sent(chunk.n, sent, shared);
}

// Writes one of the values that are sent; what bf16 cuts off is residual.
__device__ inline void send_value(const Input& input, uint64_t index, SentAs sent_as, uint8_t* to) {
  const float b = input.at(index);
  if (sent_as == SentAs::kFloat32) {
    store_word(to, bits_of(b));
    input.store(index, 0.0f);
    return;
  }
  const uint16_t narrow = narrow_bf16(b);
  to[0] = static_cast<uint8_t>(narrow);
  to[1] = static_cast<uint8_t>(narrow >> 8);
  input.store(index, b - widen_bf16(narrow));
}

static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    encode_large(Segments segments, Input input, SentAs sent_as, IndexCoder coder,
                 uint8_t* payloads, EncodedSegment* encoded, SparseScratch scratch) {
  __shared__ SentValues sent;
  __shared__ CodedWords coded;
  __shared__ CoderScratch coder_scratch;
  __shared__ BlockShared shared;
  const uint32_t number = take_ticket(scratch.ticket);
  const Chunk chunk = Chunk::create(segments, number);
  const uint32_t largest = scratch.magnitudes.of_segment[chunk.index];
  const uint32_t limit = sent_as == SentAs::kBfloat16 ? kRoundsToInfinity : kNonFiniteBits;
  if (largest >= limit) {
    tell_non_finite(chunk, input, limit, encoded);
    return;
  }
  find_large(chunk, input, scratch.thresholds[chunk.index], sent, shared);
  if (largest == 0) return;  // nothing is sent but the header; a residual that is cancelled is 0
  const bool rice = coder == IndexCoder::kRice;
  const uint32_t coded_size =
      rice ? code_trits(TernaryCoder::kRice, sent.trits, chunk.n, coded, coder_scratch, shared)
           : (chunk.n + 7) / 8;
  const auto index_size = static_cast<uint32_t>(coded_size + (rice ? kIndexSizeBytes : 0));
  const uint32_t width = width_of(sent_as);
  const uint32_t size = index_size + sent.count * width;
  const uint64_t place = place_chunk(&scratch.told[number], chunk.of_segment, size);
  const uint64_t sizes =
      chunk.segment.chunks > 1 ? 4 * static_cast<uint64_t>(chunk.segment.chunks) : 0;
  uint8_t* payload = payloads + chunk.segment.payload;
  uint8_t* to = payload + sizes + place;
  copy_out(rice ? coded.words : sent.trits.plus, coded_size, to + (index_size - coded_size));
  for_each_value(chunk.n, sent, [&](uint32_t at, bool is_sent, uint32_t rank) {
    if (is_sent) send_value(input, chunk.begin + at, sent_as, to + index_size + rank * width);
  });
  if (threadIdx.x != 0) return;
  if (rice) {
    to[0] = static_cast<uint8_t>(coded_size);
    to[1] = static_cast<uint8_t>(coded_size >> 8);
  }
  if (sizes != 0) store_word(payload + 4 * static_cast<uint64_t>(chunk.of_segment), size);
  if (chunk.of_segment + 1 == chunk.segment.chunks)
    encoded[chunk.index].size = sizes + place + size;
}

// Before the first kernel of a call.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    clear_sparse_scratch(Segments segments, EncodedSegment* encoded, SparseScratch scratch) {
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  clear_at(i, segments, encoded, scratch.magnitudes);
  if (i < segments.chunks) scratch.told[i] = 0;
  if (i == 0) *scratch.ticket = 0;
}

}  // namespace gradwire::cuda
