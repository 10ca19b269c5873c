// bfloat16 spans, for one SIMD target. Contracts: stages/kernels.h.

#if defined(GRADWIRE_STAGES_BFLOAT16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_BFLOAT16_INL_H_
#undef GRADWIRE_STAGES_BFLOAT16_INL_H_
#else
#define GRADWIRE_STAGES_BFLOAT16_INL_H_
#endif

#include "hwy/highway.h"

#include "stages/element.h"
#include "stages/half-inl.h"
#include "stages/load-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace {

struct Bfloat16 {
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> v, uint16_t* to) {
    store_narrowed(d, v, to);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint16_t* from) {
    return load_widened(d, from);
  }
  static uint16_t narrow(float x) { return gradwire::narrow_bf16(x); }
  static float widen(uint16_t x) { return gradwire::widen_bf16(x); }
};

void narrow_bf16(const float* x, size_t n, uint16_t* out) { narrow_to<Bfloat16>(x, n, out); }

void widen_bf16(const uint16_t* x, size_t n, float* out) { widen_to<Bfloat16>(x, n, StoreTo{out}); }

void widen_add_bf16(const uint16_t* x, size_t n, float* out) {
  widen_to<Bfloat16>(x, n, AddTo{out});
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
