#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "gradwire/status.h"
#include "stages/element/float_bits.h"

namespace gradwire {

// kCorruptPayload unless each of `count` scales is finite, its sign bit clear, its bits at most
// `largest`, and one at least is not 0: where all are, the payload is empty.
Status check_scales(std::string_view name, const std::byte* scales, uint64_t count,
                    uint32_t largest = kNonFiniteBits - 1);

// Whether each of `count` scales is +0: then the payload is empty.
bool all_zero(const std::byte* scales, uint64_t count);

}  // namespace gradwire
