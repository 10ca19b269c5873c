#pragma once

// Encoding of codecs whose values are -m, 0 or +m. Each block handles one chunk; a first pass finds
// the largest magnitudes of the groups, and a second one does everything else. A quantizer says
// what is special about a codec:
//
//   struct Quantizer {
//     static constexpr bool kDraws;  // whether trit needs a random word
//     // On the host: takes its own scratch, and queues the kernels of the first pass.
//     void take_scratch(const Segments& segments, ScratchLayout& layout);
//     Status measure(const Segments& segments, const Input& input, const Magnitudes& magnitudes,
//                    cudaStream_t stream) const;
//     // Called once for a chunk, in every thread; `index` is the segment's.
//     __device__ void begin(uint32_t index);
//     // Of a value, and of a group, with this largest magnitude in the group.
//     __device__ int trit(float b, uint32_t word, uint32_t largest) const;
//     __device__ float scale(uint32_t largest) const;
//   };

#include <cstdint>

#include "cuda/coded/coded_encode.cuh"
#include "cuda/common/draws.cuh"
#include "cuda/ternary/ternary_code.cuh"
#include "cuda/ternary/ternary_layout.cuh"
#include "stages/ternary/nearest_trit.h"

namespace gradwire::cuda {

// Writes the scales of the groups that begin in this chunk.
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
    encode_ternary(Segments segments, Encoding encoding, Quantizer quantizer,
                   TernaryLayout layout) {
  __shared__ TritWords trits;
  __shared__ CodedWords coded;
  __shared__ CoderScratch coder_scratch;
  __shared__ BlockShared shared;
  const uint32_t number = take_ticket(encoding.ticket);
  const Chunk chunk = Chunk::create(segments, number);
  const Segment& segment = chunk.segment;
  if (encoding.refuse(chunk, kNonFiniteBits)) return;
  quantizer.begin(chunk.index);
  DrawStream stream{};
  if constexpr (Quantizer::kDraws) stream = draw_stream_of(encoding.draw, segment);
  uint32_t words[kUnrolled] = {};
  const auto draw_before = [&](uint32_t at) {
    if constexpr (Quantizer::kDraws) draw_words(stream, chunk.first + at, words);
  };
  const uint32_t* magnitudes = encoding.magnitudes.of_scale;
  const ScaleOf scale_of(chunk);
  uint32_t magnitude = magnitudes[segment.first_scale];
  encoding.input.replace(chunk.begin, chunk.n, draw_before, [&](uint32_t i, uint32_t at, float b) {
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
  end_trits(chunk.n, trits);
  // Of zeros only a header is sent. The residual is stored all the same, as x may cancel it.
  if (encoding.magnitudes.of_segment[chunk.index] == 0) return;
  const uint32_t size = code_trits(layout.coder, trits, chunk.n, coded, coder_scratch, shared);
  copy_out(coded.words, size, encoding.place(layout, chunk, number, size));
  write_scales(chunk, magnitudes, quantizer, encoding.payload(chunk));
}

}  // namespace gradwire::cuda
