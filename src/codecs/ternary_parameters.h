#pragma once

#include <cstdint>

#include "codecs/ternary_coder.h"

namespace gradwire {

// param_a of a codec whose header states a number beside the coder, for people who inspect frames;
// no decoder needs it. Bits 0 to 1 hold the coder, bits 2 to 15 number * units, or their maximum.
uint16_t pack_param_a(TernaryCoder coder, float number, float units);

// The bits of the coder, not checked.
TernaryCoder stated_coder(uint16_t param_a);

// The number, rounded to a multiple of 1 / steps: coarser than the units, so that a short decimal
// reads as it was given.
double stated_number(uint16_t param_a, double units, double steps);

}  // namespace gradwire
