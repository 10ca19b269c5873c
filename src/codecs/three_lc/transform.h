#pragma once

#include "codecs/three_lc/payload.h"
#include "gradwire/codec.h"

namespace gradwire {

// The encoder behind Codec::encode: sizes have been checked. kNonFinite carries no message here;
// the codec names the element.
Result<uint64_t> encode_three_lc(const ThreeLcParameters& parameters, std::span<const float> x,
                                 ResidualView residual, std::span<std::byte> payload,
                                 Execution& execution);

// Behind Codec::check_size.
Status check_three_lc_size(const ThreeLcParameters& parameters, uint64_t n, uint64_t size);

// Behind Codec::decode.
Status decode_three_lc(const ThreeLcParameters& parameters, std::span<const std::byte> payload,
                       std::span<float> out, DecodeMode mode, Execution& execution);

}  // namespace gradwire
