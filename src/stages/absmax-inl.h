// Largest magnitude, for one SIMD target. Contracts: stages/kernels.h.

#if defined(GRADWIRE_STAGES_ABSMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_ABSMAX_INL_H_
#undef GRADWIRE_STAGES_ABSMAX_INL_H_
#else
#define GRADWIRE_STAGES_ABSMAX_INL_H_
#endif

#include "hwy/highway.h"

#include "stages/element.h"
#include "stages/load-inl.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace {

// max of the sign-cleared bits of load(i) for i < n; tail(i) is the same for one element.
// Two accumulators, as one would wait for itself. Signed max will do: the sign bit is clear.
template <typename Load, typename Tail>
HWY_INLINE uint32_t absmax_of(size_t n, Load load, Tail tail) {
  const hn::ScalableTag<float> df;
  const hn::RebindToSigned<decltype(df)> di;
  const size_t lanes = hn::Lanes(df);
  auto max0 = hn::Zero(di);
  auto max1 = hn::Zero(di);
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    max0 = hn::Max(max0, hn::BitCast(di, hn::Abs(load(df, i))));
    max1 = hn::Max(max1, hn::BitCast(di, hn::Abs(load(df, i + lanes))));
  }
  uint32_t max = static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, hn::Max(max0, max1))));
  for (; i < n; ++i) max = HWY_MAX(max, magnitude_bits(tail(i)));
  return max;
}

uint32_t absmax(const float* x, size_t n) {
  return absmax_of(
      n, [=](auto d, size_t i) HWY_ATTR { return hn::LoadU(d, x + i); },
      [=](size_t i) { return x[i]; });
}

uint32_t absmax_f32(const float* x, const float* r, size_t n) {
  return absmax_of(
      n,
      [=](auto d, size_t i) HWY_ATTR { return hn::Add(hn::LoadU(d, x + i), hn::LoadU(d, r + i)); },
      [=](size_t i) { return x[i] + r[i]; });
}

uint32_t absmax_bf16(const float* x, const uint16_t* r, size_t n) {
  return absmax_of(
      n,
      [=](auto d, size_t i)
          HWY_ATTR { return hn::Add(hn::LoadU(d, x + i), load_widened(d, r + i)); },
      [=](size_t i) { return x[i] + gradwire::widen_bf16(r[i]); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
