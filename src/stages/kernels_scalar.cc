#include "stages/arithmetic/arithmetic_scalar.h"
#include "stages/dense/dense_scalar.h"
#include "stages/draws/draws_scalar.h"
#include "stages/elias/elias_scalar.h"
#include "stages/float_clip/float_clip_scalar.h"
#include "stages/half/half_scalar.h"
#include "stages/int8/int8_scalar.h"
#include "stages/kernel_tables.h"
#include "stages/levels/levels_scalar.h"
#include "stages/magnitude/magnitude_scalar.h"
#include "stages/places/places_scalar.h"
#include "stages/rice/rice_scalar.h"
#include "stages/signs/signs_scalar.h"
#include "stages/steps/steps_scalar.h"
#include "stages/ternary/ternary_scalar.h"
#include "stages/threshold/threshold_scalar.h"
#include "stages/trits/trits_scalar.h"
#include "stages/truncation/truncation_scalar.h"
#include "stages/zero_run/zero_run_scalar.h"

namespace gradwire {
namespace {

const char* compiled_target() { return "scalar"; }

constexpr Kernels kScalar = {
    .name = "scalar",
    .compiled_target = compiled_target,
#define GW_KERNEL(result, kernel, ...) .kernel = scalar::kernel,
#include "stages/kernels.def"
#undef GW_KERNEL
};

}  // namespace

const Kernels& scalar_kernels() { return kScalar; }

}  // namespace gradwire
