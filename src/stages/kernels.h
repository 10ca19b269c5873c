#pragma once

// The loops that the codecs call, once for each SIMD target. All targets give the same bytes; the
// table "scalar", whose loops call the functions of the stages' headers, is the definition.
//
// For every kernel: bytes may be unaligned, and so may the inputs of widen_*, the second input of
// sum and the outputs of narrow_*. n = 0 is allowed. Nothing outside the spans is read or written,
// because the bytes after them may belong to another thread. Kernels allocate nothing and keep no
// state. Spans don't overlap. Floats follow IEEE 754; the payload bits of a NaN are not promised.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/philox.h"
#include "gradwire/decode_mode.h"
#include "stages/dense/dense_bits.h"
#include "stages/element/residual_access.h"
#include "stages/float_clip/float_clip.h"
#include "stages/levels/levels.h"
#include "stages/magnitude/moments.h"
#include "stages/signs/signs.h"
#include "stages/steps/steps.h"
#include "stages/ternary/trit_draws.h"
#include "stages/trits/trit_bits.h"
#include "stages/zero_run/zero_run.h"

namespace gradwire {

// One pointer for each line of kernels.def, which states the contracts.
struct Kernels {
  // "scalar", "ssse3", "sse4", "avx2", "avx3", "avx3_dl", "neon", ...
  const char* name;
  // Returns the target that the kernels of this table were compiled for. Tests compare it with
  // `name`.
  const char* (*compiled_target)();
#define GW_KERNEL(result, kernel, ...) result (*kernel)(__VA_ARGS__);
#include "stages/kernels.def"
#undef GW_KERNEL
};

// The targets that this CPU has and this build contains, best first, "scalar" last.
[[nodiscard]] std::span<const Kernels* const> available_kernels();

// The table of the named target; "auto" names the best target. nullptr if it is not available.
[[nodiscard]] const Kernels* find_kernels(std::string_view name);

}  // namespace gradwire
