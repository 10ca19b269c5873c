// Spans of a 16-bit float format, for one SIMD target.

#if defined(GRADWIRE_STAGES_HALF_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_HALF_INL_H_
#undef GRADWIRE_STAGES_HALF_INL_H_
#else
#define GRADWIRE_STAGES_HALF_INL_H_
#endif

#include "hwy/highway.h"

#include "stages/element.h"
#include "stages/output-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// Half::store and Half::load convert vectors, Half::narrow and Half::widen elements.
template <class Half>
HWY_INLINE void narrow_to(const float* x, size_t n, uint16_t* out) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) Half::store(d, hn::LoadU(d, x + i), out + i);
  for (; i < n; ++i) store_unaligned(out + i, Half::narrow(x[i]));
}

template <class Half, class Output>
HWY_INLINE void widen_to(const uint16_t* x, size_t n, Output out) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) out.put(d, Half::load(d, x + i), i);
  for (; i < n; ++i) out.put(Half::widen(load_unaligned(x + i)), i);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
