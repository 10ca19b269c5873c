#include "codecs/drawn_ternary.h"

#include <algorithm>
#include <atomic>

#include "base/philox.h"
#include "codecs/draws.h"
#include "stages/kernels.h"
#include "stages/ternary/trit_draws.h"
#include "stages/trits/trit_bits.h"
#include "stages/trits/two_bits.h"

namespace gradwire {

static_assert(Input::kPartValues % kWordBits == 0 && kDrawnWords % kWordBits == 0);

Measurement measure_moments(const Input& input, uint64_t begin, uint64_t n) {
  float buffer[kChunkValues];
  const Moments found = input.kernels().moments(input.load(begin, n, buffer), n);
  return {.largest = found.largest, .sums = {found.sum, found.squares}};
}

float clipping_limit_of(const Measurement& moments, uint64_t n, float clip) {
  return clipping_limit({moments.sums[0], moments.sums[1], moments.largest}, n, clip);
}

uint64_t draw_chunk(TernaryCoder coder, const Encoding& encoding, float limit, uint64_t chunk,
                    uint8_t* slot) {
  const Kernels& kernels = encoding.kernels();
  const DrawContext& draw = encoding.draw;
  const DrawStream stream = DrawStream::create(draw.seed, draw.stream, draw.step);
  TritBits trits;
  encoding.for_each_piece(chunk, [&](uint64_t group, uint64_t begin, uint64_t at, uint64_t values) {
    const float scale = encoding.scale(group);
    const TritDraw of_group = TritDraw::create(limit, scale);
    uint64_t* plus = trits.plus + at / kWordBits;
    uint64_t* minus = trits.minus + at / kWordBits;
    encoding.input.encode_parts(
        begin, values,
        [&](uint64_t first, uint64_t n, const float* b) {
          for_each_drawn(stream, begin + first, n, kernels,
                         [&](uint64_t drawn, uint64_t count, const uint32_t* words) {
                           const uint64_t word = (first + drawn) / kWordBits;
                           kernels.draw_trits(b + drawn, count, of_group, words, plus + word,
                                              minus + word);
                         });
        },
        [&](uint64_t first, uint64_t n, float* decoded) {
          uint8_t packed[Input::kPartValues / kTwoBitTrits];
          kernels.pack_two_bits(plus + first / kWordBits, minus + first / kWordBits, n, packed);
          kernels.unpack_two_bits(packed, n, scale, decoded, DecodeMode::kStore);
        });
  });
  return code_trits(coder, trits, encoding.shape.chunks.values(chunk), slot, kernels);
}

std::optional<TernaryRange> measure_range(float clip, const InputView& x, Execution& execution) {
  const Input input(x, {}, execution.kernels());
  const Measurement whole =
      measure_chunks(input, execution, clip != 0.0f ? measure_moments : measure_absmax);
  if (whole.largest >= kNonFiniteBits) return std::nullopt;
  const float limit = clipping_limit_of(whole, x.size(), clip);
  return TernaryRange{.limit = limit, .largest = std::min(float_of(whole.largest), limit)};
}

void measure_group_scales(const TernaryShape& shape, float limit, const InputView& x,
                          std::byte* scales, Execution& execution) {
  const Input input(x, {}, execution.kernels());
  const Groups& groups = shape.groups;
  const uint64_t groups_a_task = std::max<uint64_t>(1, kChunkValues / groups.size);
  execution.for_each((groups.count - 1) / groups_a_task + 1, [&](size_t task) {
    const uint64_t last = std::min(groups.count, (task + 1) * groups_a_task);
    for (uint64_t group = task * groups_a_task; group < last; ++group) {
      const uint32_t largest = input.absmax(groups.begin(group), groups.values(group));
      store_le_f32(scales + shape.head_at(group), std::min(float_of(largest), limit));
    }
  });
}

uint64_t draw_with_scales(const TernaryShape& shape, float limit, const InputView& x,
                          const DrawContext& draw, std::span<std::byte> payload,
                          Execution& execution) {
  // Nothing is sent but the header.
  if (all_zero(payload.data(), shape.groups.count)) return 0;
  const Encoding encoding{Input(x, {}, execution.kernels()), shape, {}, draw, payload.data()};
  return encode_chunks(shape.chunks, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
    return draw_chunk(shape.coder, encoding, limit, chunk, slot);
  });
}

}  // namespace gradwire
