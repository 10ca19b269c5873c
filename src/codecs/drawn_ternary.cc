#include "codecs/drawn_ternary.h"

#include <algorithm>
#include <vector>

#include "base/endian.h"
#include "base/philox.h"
#include "codecs/checks.h"
#include "codecs/draws.h"
#include "codecs/input.h"
#include "codecs/scales.h"
#include "stages/element.h"
#include "stages/kernels.h"
#include "stages/trit_bits.h"
#include "stages/trit_draws.h"

namespace gradwire {
namespace {

static_assert(Input::kPartValues % kWordBits == 0 && kDrawnWords % kWordBits == 0);

// Of all values, chunk by chunk. From the end to the start, as for_each_absmax.
Moments moments_of(const Input& input, const ChunkShape& shape, Execution& execution) {
  std::vector<Moments> of_chunk(shape.chunks);
  execution.for_each(shape.chunks, [&](size_t i) {
    float buffer[kChunkValues];
    const uint64_t chunk = shape.chunks - 1 - i;
    const uint64_t n = shape.values(chunk);
    of_chunk[chunk] = execution.kernels().moments(input.load(shape.begin(chunk), n, buffer), n);
  });
  Moments total;
  for (const Moments& moments : of_chunk) {
    total.sum += moments.sum;
    total.squares += moments.squares;
    total.largest = std::max(total.largest, moments.largest);
  }
  return total;
}

// The bits of one chunk's trits; residuals become what is left of the values.
void draw_chunk(const TernaryShape& shape, uint64_t chunk, const Input& input, float limit,
                const DrawStream& stream, const std::byte* scales, TritBits& trits,
                const Kernels& kernels) {
  const uint64_t chunk_begin = shape.chunks.begin(chunk);
  shape.buckets.for_each_piece(
      chunk_begin, chunk_begin + shape.chunks.values(chunk),
      [&](uint64_t bucket, uint64_t begin, uint64_t values) {
        const float scale = load_le_f32(scales + bucket * sizeof(float));
        const TritDraw draw = TritDraw::create(limit, scale);
        uint64_t* plus = trits.plus + (begin - chunk_begin) / kWordBits;
        uint64_t* minus = trits.minus + (begin - chunk_begin) / kWordBits;
        input.encode_parts(
            begin, values,
            [&](uint64_t first, uint64_t n, const float* b) {
              for_each_drawn(stream, begin + first, n, kernels,
                             [&](uint64_t at, uint64_t count, const uint32_t* words) {
                               const uint64_t word = (first + at) / kWordBits;
                               kernels.draw_trits(b + at, count, draw, words, plus + word,
                                                  minus + word);
                             });
            },
            [&](uint64_t first, uint64_t n, float* decoded) {
              uint8_t packed[Input::kPartValues / kTwoBitTrits];
              kernels.pack_two_bits(plus + first / kWordBits, minus + first / kWordBits, n, packed);
              kernels.unpack_two_bits(packed, n, scale, decoded);
            });
      });
}

}  // namespace

Result<float> measure_scales(const CodecInfo& info, const TernaryShape& shape, float clip,
                             const InputView& x, const ResidualView& residual, std::byte* scales,
                             Execution& execution) {
  const Input input(x, residual, execution.kernels());
  const auto put = [&](uint64_t bucket, uint32_t magnitude) {
    store_le(scales + bucket * sizeof(float), magnitude);
  };
  Moments moments;
  if (clip != 0.0f) moments = moments_of(input, shape.chunks, execution);
  uint32_t largest = moments.largest;
  if (clip != 0.0f && shape.buckets.count == 1) {
    put(0, largest);
  } else {
    largest = for_each_absmax(input, shape.buckets, execution, put);
  }
  if (largest >= kNonFiniteBits) return check_finite(info, x, residual);
  const float limit = clipping_limit(moments, x.size(), clip);
  for (uint64_t bucket = 0; bucket < shape.buckets.count; ++bucket) {
    std::byte* scale = scales + bucket * sizeof(float);
    store_le_f32(scale, std::min(load_le_f32(scale), limit));
  }
  return limit;
}

uint64_t draw_with_scales(const TernaryShape& shape, float limit, const InputView& x,
                          const ResidualView& residual, const DrawContext& draw,
                          std::span<std::byte> payload, Execution& execution) {
  const Input input(x, residual, execution.kernels());
  const bool nothing = all_zero(payload.data(), shape.buckets.count);
  // Nothing is sent but the header. A residual that the input has just cancelled is now 0.
  if (nothing && !input.keeps_residual()) return 0;
  const DrawStream stream = DrawStream::create(draw.seed, draw.stream, draw.step);
  const uint64_t size =
      encode_chunks(shape.chunks, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
        TritBits trits;
        draw_chunk(shape, chunk, input, limit, stream, payload.data(), trits, execution.kernels());
        return code_trits(shape.coder, trits, shape.chunks.values(chunk), slot,
                          execution.kernels());
      });
  return nothing ? 0 : size;
}

Result<uint64_t> encode_drawn_ternary(const CodecInfo& info, const TernaryShape& shape, float clip,
                                      const InputView& x, const ResidualView& residual,
                                      const DrawContext& draw, std::span<std::byte> payload,
                                      Execution& execution) {
  if (x.empty()) return 0;
  Result<float> limit = measure_scales(info, shape, clip, x, residual, payload.data(), execution);
  if (!limit.ok()) return limit.status();
  return draw_with_scales(shape, limit.value(), x, residual, draw, payload, execution);
}

}  // namespace gradwire
