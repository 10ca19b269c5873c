#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradwire/codec.h"
#include "gradwire/status.h"
#include "stages/element.h"

namespace gradwire {

// Checks at the edge of a codec; behind them its kernels can't fail.

// kBufferTooSmall unless `room` bytes hold any payload of n values.
Status check_payload_room(const Codec& codec, uint64_t n, uint64_t room);

// kCorruptPayload unless a payload of `size` bytes is n values of `width` bytes.
Status check_payload_size(const CodecInfo& info, uint64_t n, uint64_t width, uint64_t size);

// kReservedBits unless both parameters are zero.
Status check_no_wire_parameters(const CodecInfo& info, const WireCodec& wire);

// kLengthMismatch unless the residual is absent or as long as x.
Status check_residual_size(const CodecInfo& info, uint64_t n, const ResidualView& residual);

// kNonFinite naming the first element of x + residual whose magnitude bits are at least `limit`: by
// default NaN and Inf. Ok where there is none.
Status check_finite(const CodecInfo& info, const InputView& x, const ResidualView& residual,
                    uint32_t limit = kNonFiniteBits);

}  // namespace gradwire
