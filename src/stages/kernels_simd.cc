// Compiles the *-inl.h files once for each SIMD target that the compiler can make. Files that other
// *-inl.h files include have an include guard that opens again for the next target.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "stages/kernel_tables.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "stages/kernels_simd.cc"
#define HWY_WANT_AVX3_DL  // Highway before 1.1 makes this target on demand only
#include "hwy/foreach_target.h"
// clang-format off
#include "hwy/highway.h"
// clang-format on

#ifndef GRADWIRE_STAGES_KERNELS_SIMD_
#define GRADWIRE_STAGES_KERNELS_SIMD_
namespace gradwire {
// The table of one of Highway's targets; nullptr if this build lacks it.
template <int64_t kTarget>
inline constexpr const Kernels* kTableOf = nullptr;
}  // namespace gradwire
#endif

// Highway's fall-backs without vectors are left out: stages/kernels_scalar.cc takes their place.
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

#include "stages/arithmetic/arithmetic-inl.h"
#include "stages/dense/dense-inl.h"
#include "stages/draws/philox-inl.h"
#include "stages/elias/elias-inl.h"
#include "stages/float_clip/float_clip-inl.h"
#include "stages/half/half-inl.h"
#include "stages/int8/int8-inl.h"
#include "stages/levels/levels-inl.h"
#include "stages/magnitude/absmax-inl.h"
#include "stages/magnitude/moments-inl.h"
#include "stages/places/places-inl.h"
#include "stages/rice/rice-inl.h"
#include "stages/signs/signs-inl.h"
#include "stages/steps/steps-inl.h"
#include "stages/ternary/ternary-inl.h"
#include "stages/ternary/ternary_encode-inl.h"
#include "stages/ternary/trit_draws-inl.h"
#include "stages/threshold/threshold-inl.h"
#include "stages/trits/trit_sums-inl.h"
#include "stages/trits/two_bits-inl.h"
#include "stages/truncation/truncation-inl.h"
#include "stages/zero_run/unpack-inl.h"
#include "stages/zero_run/zero_run-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {

// "N_AVX3_DL" -> "avx3_dl"
constexpr std::array<char, 32> lower_case_target() {
  constexpr std::string_view text = HWY_STR(HWY_NAMESPACE);
  std::array<char, 32> name{};
  for (size_t i = 2; i < text.size(); ++i) {
    const char c = text[i];
    name[i - 2] = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return name;
}

constexpr std::array<char, 32> kTargetName = lower_case_target();

const char* compiled_target() { return kTargetName.data(); }

extern constexpr Kernels kTable = {
    .name = kTargetName.data(),
    .compiled_target = compiled_target,
#define GW_KERNEL(result, kernel, ...) .kernel = kernel,
#include "stages/kernels.def"
#undef GW_KERNEL
};

}  // namespace HWY_NAMESPACE

template <>
inline constexpr const Kernels* kTableOf<HWY_TARGET> = &HWY_NAMESPACE::kTable;

}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif

#if HWY_ONCE

namespace gradwire {

void append_simd_kernels(std::vector<const Kernels*>& tables) {
  const int64_t supported = hwy::SupportedTargets();
  // Highway gives a better target a lower bit.
  [&]<size_t... kBit>(std::index_sequence<kBit...>) {
    for (const Kernels* table :
         {(supported >> kBit & 1) != 0 ? kTableOf<1LL << kBit> : nullptr...}) {
      if (table != nullptr) tables.push_back(table);
    }
  }
  (std::make_index_sequence<63>());
}

}  // namespace gradwire

#endif  // HWY_ONCE
