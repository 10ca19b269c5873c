// bfloat16 spans, for one SIMD target. Contracts: stages/kernels.h.

#if defined(GRADWIRE_STAGES_BFLOAT16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_BFLOAT16_INL_H_
#undef GRADWIRE_STAGES_BFLOAT16_INL_H_
#else
#define GRADWIRE_STAGES_BFLOAT16_INL_H_
#endif

#include "hwy/highway.h"

#include "stages/element.h"
#include "stages/load-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace {

void narrow_bf16(const float* x, size_t n, uint16_t* out) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) store_narrowed(d, hn::LoadU(d, x + i), out + i);
  for (; i < n; ++i) store_unaligned(out + i, gradwire::narrow_bf16(x[i]));
}

void widen_bf16(const uint16_t* x, size_t n, float* out) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(load_widened(d, x + i), d, out + i);
  for (; i < n; ++i) out[i] = gradwire::widen_bf16(load_unaligned(x + i));
}

void widen_add_bf16(const uint16_t* x, size_t n, float* out) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, out + i), load_widened(d, x + i)), d, out + i);
  }
  for (; i < n; ++i) out[i] += gradwire::widen_bf16(load_unaligned(x + i));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
