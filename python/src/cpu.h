#pragma once
#include <stdexcept>
#include <string>

namespace gradwire::python {

// The first instruction set that this module was compiled for (as with -march=native in CXXFLAGS)
// and that this CPU lacks; "" if there is none. Without such flags the module needs the baseline of
// its architecture alone, x86-64 or Armv8-A: faster kernels are chosen when it runs.
inline std::string missing_instructions() {
#ifdef __x86_64__
#define GW_NEEDS(set) \
  if (!__builtin_cpu_supports(set)) return set
#ifdef __SSE4_2__
  GW_NEEDS("sse4.2");
#endif
#ifdef __AVX__
  GW_NEEDS("avx");
#endif
#ifdef __AVX2__
  GW_NEEDS("avx2");
#endif
#ifdef __FMA__
  GW_NEEDS("fma");
#endif
#ifdef __BMI2__
  GW_NEEDS("bmi2");
#endif
#ifdef __AVX512F__
  GW_NEEDS("avx512f");
#endif
#ifdef __AVX512BW__
  GW_NEEDS("avx512bw");
#endif
#ifdef __AVX512VBMI2__
  GW_NEEDS("avx512vbmi2");
#endif
#undef GW_NEEDS
#endif
  return "";
}

// Throws if missing_instructions() names any, which the import of the module raises as ImportError.
// Called before anything else.
inline void require_cpu() {
  const std::string missing = missing_instructions();
  if (missing.empty()) return;
  throw std::runtime_error(
      "this build of gradwire was compiled for a CPU with " + missing +
      ", which this CPU lacks; install a wheel of gradwire, or build it again without -march or -m "
      "options in CXXFLAGS");
}

}  // namespace gradwire::python
