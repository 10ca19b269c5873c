#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codecs/ternary.h"
#include "gradwire/codec.h"
#include "gradwire/execution.h"

namespace gradwire {

// Buckets of drawn trits hold a multiple of so many values: whole words of bits, whole packed
// bytes.
inline constexpr uint32_t kDrawnBucketMultiple = 320;

// Encodes with trits that are drawn (TernGrad, section 3): values are clipped to `clip` times the
// standard deviation of the segment (0, or no deviation: not at all), the largest clipped magnitude
// of a bucket is its scale, and a trit is not 0 with the probability |clipped value| / scale.
// Returns the payload's size, or kNonFinite. `payload` has room for shape.max_size().
Result<uint64_t> encode_drawn_ternary(const CodecInfo& info, const TernaryShape& shape, float clip,
                                      const InputView& x, const ResidualView& residual,
                                      const DrawContext& draw, std::span<std::byte> payload,
                                      Execution& execution);

// The two halves of it, for those who share scales. First: the scale of each bucket (f32), and what
// values are clipped to. kNonFinite. x is not empty.
Result<float> measure_scales(const CodecInfo& info, const TernaryShape& shape, float clip,
                             const InputView& x, const ResidualView& residual, std::byte* scales,
                             Execution& execution);

// Second: draws with the scales that stand in front of `payload`, none below that of x. x is finite
// and not empty. Returns the payload's size: 0 where all scales are 0.
uint64_t draw_with_scales(const TernaryShape& shape, float limit, const InputView& x,
                          const ResidualView& residual, const DrawContext& draw,
                          std::span<std::byte> payload, Execution& execution);

}  // namespace gradwire
