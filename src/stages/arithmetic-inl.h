// Sums and quotients of spans, for one SIMD target. Contracts: stages/kernels.h.

#if defined(GRADWIRE_STAGES_ARITHMETIC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_ARITHMETIC_INL_H_
#undef GRADWIRE_STAGES_ARITHMETIC_INL_H_
#else
#define GRADWIRE_STAGES_ARITHMETIC_INL_H_
#endif

#include "hwy/highway.h"

#include "stages/element.h"
#include "stages/load-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace {

void add_f32(const float* x, size_t n, float* out) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, out + i), hn::LoadU(d, x + i)), d, out + i);
  }
  for (; i < n; ++i) out[i] += load_unaligned(x + i);
}

void sum(const float* a, const float* b, size_t n, float* out) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, out + i);
  }
  for (; i < n; ++i) out[i] = a[i] + b[i];
}

void subtract(const float* a, const float* b, size_t n, float* out) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::Sub(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, out + i);
  }
  for (; i < n; ++i) out[i] = a[i] - b[i];
}

void divide(float* x, size_t n, float divisor) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto divisors = hn::Set(d, divisor);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::Div(hn::LoadU(d, x + i), divisors), d, x + i);
  }
  for (; i < n; ++i) x[i] /= divisor;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
