#pragma once

// The kernels of codecs whose values are -m, 0 or +m. A block takes a chunk; the buckets' largest
// magnitudes are found in a first pass, everything else is done in a second. A quantizer says what
// is special about a codec:
//
//   struct Quantizer {
//     static constexpr bool kDraws;  // whether trit needs a random word
//     // On the host: its own scratch, and the kernels of the first pass.
//     void take_scratch(const Segments& segments, ScratchLayout& layout);
//     Status measure(const Segments& segments, const Input& input, const Magnitudes& magnitudes,
//                    cudaStream_t stream) const;
//     // Once a chunk, in every thread; `index` is the segment's.
//     __device__ void begin(uint32_t index);
//     // Of a value whose bucket has this largest magnitude.
//     __device__ int trit(float b, uint32_t word, uint32_t largest) const;
//     __device__ float scale(uint32_t largest) const;
//   };

#include <cstdint>

#include "codecs/ternary.h"
#include "cuda/compaction.cuh"
#include "cuda/draws.cuh"
#include "cuda/input.cuh"
#include "cuda/magnitudes.cuh"
#include "cuda/segments.h"
#include "cuda/ternary_code.cuh"
#include "cuda/unaligned.cuh"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

// Scratch of a call, zeros before the first kernel (clear_scratch).
struct TernaryScratch {
  Magnitudes magnitudes;
  uint64_t* told;  // of each chunk (compaction.cuh)
  uint32_t* ticket;
};

// Writes the scales of the buckets that begin in this chunk.
template <typename Quantizer>
__device__ void write_scales(const Chunk& chunk, const uint32_t* magnitudes,
                             const Quantizer& quantizer, uint8_t* payload) {
  const uint64_t end = chunk.end_scale();
  for (uint64_t i = chunk.first_scale() + threadIdx.x; i < end; i += kThreads) {
    store_word(payload + 4 * i,
               bits_of(quantizer.scale(magnitudes[chunk.segment.first_scale + i])));
  }
}

// Quantizes, packs, codes and places a chunk.
template <typename Quantizer>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    encode_ternary(Segments segments, Input input, Quantizer quantizer, DrawContext draw,
                   TernaryCoder coder, uint8_t* payloads, EncodedSegment* encoded,
                   TernaryScratch scratch) {
  __shared__ TritWords trits;
  __shared__ CodedWords coded;
  __shared__ CoderScratch coder_scratch;
  __shared__ BlockShared shared;
  const uint32_t ticket = take_ticket(scratch.ticket);
  const Chunk chunk = Chunk::create(segments, ticket);
  const Segment& segment = chunk.segment;
  const uint32_t largest = scratch.magnitudes.of_segment[chunk.index];
  if (largest >= kNonFiniteBits) return tell_non_finite(chunk, input, kNonFiniteBits, encoded);
  quantizer.begin(chunk.index);
  DrawStream stream{};
  if constexpr (Quantizer::kDraws) {
    stream = DrawStream::create(draw.seed, draw.stream + segment.stream, draw.step);
  }
  uint32_t words[kUnrolled] = {};
  const auto draw_before = [&](uint32_t at) {
    if constexpr (Quantizer::kDraws) draw_words(stream, chunk.first + at, words);
  };
  const uint32_t* magnitudes = scratch.magnitudes.of_scale;
  const ScaleOf scale_of(chunk);
  uint32_t magnitude = magnitudes[segment.first_scale];
  input.replace(chunk.begin, chunk.n, draw_before, [&](uint32_t i, uint32_t at, float b) {
    int trit = 0;
    if (at < chunk.n) {
      if (segment.scales > 1) magnitude = magnitudes[segment.first_scale + scale_of(at)];
      trit = quantizer.trit(b, words[i], magnitude);
    }
    const uint32_t plus = __ballot_sync(kAllLanes, trit > 0);
    const uint32_t minus = __ballot_sync(kAllLanes, trit < 0);
    if (lane() == 0) {
      trits.plus[at / 32] = plus;
      trits.minus[at / 32] = minus;
    }
    return ternary_residual(b, trit, quantizer.scale(magnitude));
  });
  if (threadIdx.x == 0) {
    // Five bits of the last values may be read across the last word.
    const uint32_t end = (chunk.n + 31) / 32;
    trits.plus[end] = 0;
    trits.minus[end] = 0;
  }
  __syncthreads();
  if (largest == 0) return;  // nothing is sent but the header; a residual that is cancelled is 0
  const uint32_t size = code_trits(coder, trits, chunk.n, coded, coder_scratch, shared);
  const uint64_t place = place_chunk(&scratch.told[ticket], chunk.of_segment, size);
  const bool listed =
      segment.chunks > 1 && (coder == TernaryCoder::kZeroRun || coder == TernaryCoder::kRice);
  uint8_t* payload = payloads + segment.payload;
  const uint64_t sizes_at = 4 * static_cast<uint64_t>(segment.scales);
  const uint64_t chunks_at = sizes_at + (listed ? 2 * static_cast<uint64_t>(segment.chunks) : 0);
  copy_out(coded.words, size, payload + chunks_at + place);
  write_scales(chunk, magnitudes, quantizer, payload);
  if (threadIdx.x != 0) return;
  if (listed) {
    store_word(payload + sizes_at + 2 * uint64_t{chunk.of_segment}, static_cast<uint16_t>(size));
  }
  if (chunk.of_segment + 1 == segment.chunks) {
    encoded[chunk.index].size = chunks_at + place + size;
  }
}

// Before the first kernel of a call.
static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    clear_scratch(Segments segments, EncodedSegment* encoded, TernaryScratch scratch) {
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  clear_at(i, segments, encoded, scratch.magnitudes);
  if (i < segments.chunks) scratch.told[i] = 0;
  if (i == 0) *scratch.ticket = 0;
}

}  // namespace gradwire::cuda
