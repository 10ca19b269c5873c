#pragma once

#include <cstdint>
#include <string>

#include "codecs/parameters.h"
#include "codecs/ternary.h"
#include "gradwire/status.h"

namespace gradwire {

// The key `coder`: none, zre or rice.
Result<TernaryCoder> parse_coder(const Parameters& given, TernaryCoder otherwise);

// Appends the key to the text of a codec's parameters, unless it is `otherwise`.
void append_coder(std::string& text, TernaryCoder coder, TernaryCoder otherwise);

// param_a of codecs whose header tells a number beside the coder, to whoever inspects a frame; no
// decoder needs it. Bits 0 to 1 are the coder's, 2 to 15 hold number * units, or their largest.
uint16_t tell_number(TernaryCoder coder, float number, float units);

// The bits of the coder, as they are.
TernaryCoder told_coder(uint16_t param_a);

// The number, rounded to a multiple of 1 / steps: coarser than the units, so that a short decimal
// reads as it was given.
float told_number(uint16_t param_a, float units, float steps);

}  // namespace gradwire
