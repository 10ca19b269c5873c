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

}  // namespace gradwire
