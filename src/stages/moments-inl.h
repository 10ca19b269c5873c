// Sums in a fixed order, for one SIMD target. Contracts: stages/kernels.h.

#if defined(GRADWIRE_STAGES_MOMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_MOMENTS_INL_H_
#undef GRADWIRE_STAGES_MOMENTS_INL_H_
#else
#define GRADWIRE_STAGES_MOMENTS_INL_H_
#endif

#include "hwy/highway.h"

#include "stages/element.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// Values that stay in the L1 cache while each group of lanes passes over them.
constexpr size_t kMomentsTile = 2048;

Moments moments(const float* x, size_t n) {
  const hn::CappedTag<double, kMomentLanes / 2> d;
  const hn::Rebind<float, decltype(d)> d32;
  const size_t lanes = hn::Lanes(d);
  MomentLanes sums;
  size_t i = 0;
  for (size_t end = 0; end < n / kMomentLanes * kMomentLanes; i = end) {
    end = HWY_MIN(i + kMomentsTile, n / kMomentLanes * kMomentLanes);
    for (size_t lane = 0; lane < kMomentLanes; lane += 2 * lanes) {
      auto sum0 = hn::LoadU(d, sums.sum + lane);
      auto sum1 = hn::LoadU(d, sums.sum + lane + lanes);
      auto squares0 = hn::LoadU(d, sums.squares + lane);
      auto squares1 = hn::LoadU(d, sums.squares + lane + lanes);
      for (size_t at = i + lane; at < end; at += kMomentLanes) {
        const auto x0 = hn::PromoteTo(d, hn::LoadU(d32, x + at));
        const auto x1 = hn::PromoteTo(d, hn::LoadU(d32, x + at + lanes));
        sum0 = hn::Add(sum0, x0);
        sum1 = hn::Add(sum1, x1);
        squares0 = hn::Add(squares0, hn::Mul(x0, x0));
        squares1 = hn::Add(squares1, hn::Mul(x1, x1));
      }
      hn::StoreU(sum0, d, sums.sum + lane);
      hn::StoreU(sum1, d, sums.sum + lane + lanes);
      hn::StoreU(squares0, d, sums.squares + lane);
      hn::StoreU(squares1, d, sums.squares + lane + lanes);
    }
  }
  for (; i < n; ++i) sums.add(i, x[i]);
  return sums.total();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
