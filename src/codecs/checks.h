#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "codecs/chunks.h"
#include "gradwire/codec.h"
#include "gradwire/status.h"
#include "stages/element/float_bits.h"

namespace gradwire {

// Checks at the edge of a codec; after them its kernels can't fail.

// kCorruptPayload: "3lc: all scales are 0, ...".
Status corrupt_payload(std::string_view name, std::string_view what);

// kNonFinite for an input that was not finite when it was measured, or is not now, but has no such
// value when all are looked at: another thread changes it.
Status changed_meanwhile(const CodecInfo& info);

// kCorruptPayload unless a payload of `size` bytes is n values of `width` bytes.
Status check_payload_size(const CodecInfo& info, uint64_t n, uint64_t width, uint64_t size);

// kCorruptPayload unless `size` is 0 (an empty payload stands for values that are all +0), or there
// are values and `size` is within [least, shape.max_size()].
Status check_chunks_size(std::string_view name, const ChunkShape& shape, uint64_t least,
                         uint64_t size);

// kCorruptPayload unless each of `count` scales is finite, its sign bit clear, its bits at most
// `largest`, and at least one scale is not 0: if all are 0, the payload is empty.
Status check_scales(std::string_view name, const std::byte* scales, uint64_t count,
                    uint32_t largest = kNonFiniteBits - 1);

// Whether each of `count` scales is +0: then the payload is empty.
bool all_zero(const std::byte* scales, uint64_t count);

// kReservedBits unless bits of a header are at most `largest`, the largest that has a meaning.
Status check_wire_bits(const CodecInfo& info, uint32_t bits, uint32_t largest);

// kReservedBits unless param_b is the size of a group: a multiple of `multiple`, or 0 for the whole
// segment.
Status check_wire_group_size(const CodecInfo& info, const WireCodec& wire, uint32_t multiple);

// kReservedBits unless both parameters are zero.
Status check_no_wire_parameters(const CodecInfo& info, const WireCodec& wire);

}  // namespace gradwire
