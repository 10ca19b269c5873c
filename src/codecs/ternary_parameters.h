#pragma once

#include <cstdint>

#include "codecs/ternary_coder.h"

namespace gradwire {

// param_a of a codec whose header states a number beside the coder, for whoever inspects a frame;
// no decoder needs it. Bits 0 to 1 are the coder's, 2 to 15 hold number * units, or their largest.
uint16_t pack_param_a(TernaryCoder coder, float number, float units);

// The bits of the coder, as they are.
TernaryCoder stated_coder(uint16_t param_a);

// The number, rounded to a multiple of 1 / steps: coarser than the units, so that a short decimal
// reads as it was given.
float stated_number(uint16_t param_a, float units, float steps);

}  // namespace gradwire
