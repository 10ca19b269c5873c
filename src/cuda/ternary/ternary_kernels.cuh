#pragma once

// Encoding of codecs whose values are -m, 0 or +m. Each block handles one chunk; a first pass finds
// the largest magnitudes of the groups, and a second one does everything else. A quantizer says
// what is special about a codec:
//
//   struct Quantizer {
//     static constexpr bool kDraws;  // whether trit needs a random word
//     // On the host: takes its own scratch memory, and queues the kernels of the first pass.
//     void measure(Call& call, const Encoding& encoding);
//     // Called once for a chunk, in every thread; `index` is the segment's.
//     __device__ void begin(uint32_t index);
//     // The trit of value b, and the scale of a group. `largest`: the bits of the largest
//     // magnitude in the group.
//     __device__ int trit(float b, uint32_t word, uint32_t largest) const;
//     __device__ float scale(uint32_t largest) const;
//   };

#include <cstdint>

#include "cuda/coded/chunk_places.cuh"
#include "cuda/common/draws.cuh"
#include "cuda/common/magnitudes.cuh"
#include "cuda/ternary/rice_decode.cuh"
#include "cuda/ternary/ternary_code.cuh"
#include "cuda/ternary/ternary_decode.cuh"
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
GW_KERNEL void encode_ternary(Segments segments, Encoding encoding, Quantizer quantizer,
                              TernaryCoder coder) {
  __shared__ TritWords trits;
  __shared__ CodedWords coded;
  __shared__ CoderScratch coder_scratch;
  __shared__ BlockShared shared;
  const Chunk chunk = Chunk::create(segments, take_ticket(encoding.ticket));
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
  const uint32_t size = code_trits(coder, trits, chunk.n, coded, coder_scratch, shared);
  copy_out(coded.words, size, place(encoding, chunk, size));
  write_scales(chunk, magnitudes, quantizer, encoding.payload(chunk));
}

template <typename Quantizer>
class TernaryKernels final : public CodecKernels {
 public:
  TernaryKernels(Quantizer quantizer, TernaryCoder coder) : quantizer_(quantizer), coder_(coder) {}

  void encode(Call& call, const EncodeArguments& arguments) const override {
    const Encoding encoding(call, arguments, call.segments.scales, call.segments.chunks);
    Quantizer quantizer = quantizer_;
    quantizer.measure(call, encoding);
    call.launch(encode_ternary<Quantizer>, call.segments.chunks, encoding, quantizer, coder_);
  }

  void decode(Call& call, const DecodeArguments& arguments) const override {
    switch (coder_) {
      case TernaryCoder::kNone:
        return decode_fixed_payloads<PackedTrits<kTritsPerByte>>(call, arguments);
      case TernaryCoder::kTwoBit:
        return decode_fixed_payloads<PackedTrits<kTwoBitTrits>>(call, arguments);
      case TernaryCoder::kZeroRun:
      case TernaryCoder::kRice:
        return decode_coded(call, arguments, FloatScales(), [&](const Decoding& decoding) {
          const uint32_t chunks = call.segments.chunks;
          call.launch(decode_ternary, chunks, decoding, coder_);
          if (coder_ != TernaryCoder::kRice) return;
          const uint32_t each = chunks_a_block(chunks);
          call.launch(decode_rice, (chunks + each - 1) / each, decoding, each);
        });
    }
  }

 private:
  Quantizer quantizer_;
  TernaryCoder coder_;
};

}  // namespace gradwire::cuda
