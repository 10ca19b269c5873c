#pragma once

// What the files of kernel tables share; for src/stages alone.

#include <vector>

#include "stages/kernels.h"

namespace gradwire {

// The definition: loops over stages/element.h.
const Kernels& scalar_kernels();

// Appends the tables of the SIMD targets that this CPU has, best first.
void append_simd_kernels(std::vector<const Kernels*>& tables);

}  // namespace gradwire
