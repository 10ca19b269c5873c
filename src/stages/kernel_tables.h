#pragma once

// The tables of kernels, for src/stages alone.

#include <vector>

#include "stages/kernels.h"

namespace gradwire {

// The definition: scalar loops over the functions of the stages' headers.
const Kernels& scalar_kernels();

// Appends the tables of the SIMD targets that this CPU has, best first.
void append_simd_kernels(std::vector<const Kernels*>& tables);

}  // namespace gradwire
