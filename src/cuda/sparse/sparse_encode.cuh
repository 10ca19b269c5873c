#pragma once

// The values that reach a threshold, and where they stand (spec/format.md, topk). Each block
// handles one chunk: it finds which values are sent, codes their places, finds its own place, and
// then reads those values, which are few, from memory again.

#include <cstdint>

#include "cuda/coded/chunk_places.cuh"
#include "cuda/common/magnitudes.cuh"
#include "cuda/sparse/sent_values.cuh"
#include "cuda/ternary/ternary_code.cuh"
#include "stages/threshold/reach.h"

namespace gradwire::cuda {

// Finds the values of a chunk that reach the threshold. The others become residual.
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
  end_trits(chunk.n, sent.trits);
  count_sent(chunk.n, sent, shared);
}

// Writes one of the values that are sent. What bf16 cuts off becomes residual.
__device__ inline void send_value(const Input& input, uint64_t index, SentAs sent_as, uint8_t* to) {
  const float b = input.at(index);
  if (sent_as == SentAs::kFloat32) {
    store_word(to, bits_of(b));
    input.store(index, 0.0f);
    return;
  }
  const uint16_t narrow = narrow_bf16(b);
  store_word(to, narrow);
  input.store(index, b - widen_bf16(narrow));
}

static GW_KERNEL void encode_large(Segments segments, Encoding encoding, TopkParameters parameters,
                                   const float* thresholds) {
  __shared__ SentValues sent;
  __shared__ CodedWords coded;
  __shared__ CoderScratch coder_scratch;
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, take_ticket(encoding.ticket));
  const SentAs sent_as = parameters.values;
  if (encoding.refuse(chunk, sent_as == SentAs::kBfloat16 ? kRoundsToInfinity : kNonFiniteBits)) {
    return;
  }
  find_large(chunk, encoding.input, thresholds[chunk.index], sent, shared);
  // Of zeros only a header is sent. The residual is stored all the same, as x may cancel it.
  if (encoding.magnitudes.of_segment[chunk.index] == 0) return;
  const bool rice = parameters.index == IndexCoder::kRice;
  const uint32_t coded_size =
      rice ? code_trits(TernaryCoder::kRice, sent.trits, chunk.n, coded, coder_scratch, shared)
           : (chunk.n + 7) / 8;
  const auto index_size = static_cast<uint32_t>(coded_size + (rice ? kIndexSizeBytes : 0));
  const uint32_t width = width_of(sent_as);
  uint8_t* to = place(encoding, chunk, index_size + sent.count * width);
  copy_out(rice ? coded.words : sent.trits.plus, coded_size, to + (index_size - coded_size));
  for_each_value(chunk.n, sent, [&](uint32_t at, bool is_sent, uint32_t rank) {
    if (is_sent) {
      send_value(encoding.input, chunk.begin + at, sent_as, to + index_size + rank * width);
    }
  });
  if (rice && threadIdx.x == 0) store_word(to, static_cast<uint16_t>(coded_size));
}

}  // namespace gradwire::cuda
