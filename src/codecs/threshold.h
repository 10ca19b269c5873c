#pragma once

#include <cstdint>

#include "codecs/input.h"

namespace gradwire {

// A magnitude that about `fraction` of the n > 0 values of the input reach: the one of that rank
// among 4096 values, one from each of as many equal strata, sorted (Aji and Heafield, EMNLP 2017,
// section 3, sample too). At least the smallest denormal, so that a zero never reaches it.
float sample_threshold(const Input& input, uint64_t n, float fraction);

}  // namespace gradwire
