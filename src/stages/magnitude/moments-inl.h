// Sums in a fixed order, for one SIMD target. Contracts: stages/kernels.def.

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/magnitude/moments.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// Number of values that stay in the L1 cache while pass after pass adds them to some of the lanes.
constexpr size_t kMomentsTile = 2048;

Moments moments(const float* x, size_t n) {
  // At most four doubles: AVX-512 converts eight slower than twice four.
  const hn::CappedTag<double, kMomentLanes / 4> d;
  const hn::Rebind<float, decltype(d)> d32;
  const hn::Repartition<float, decltype(d)> both;
  const hn::RebindToSigned<decltype(both)> di32;
  const size_t lanes = hn::Lanes(d);
  MomentLanes sums;
  // The sign bits are clear, so a signed maximum will do.
  auto largest0 = hn::Zero(di32);
  auto largest1 = hn::Zero(di32);
  size_t i = 0;
  for (size_t end = 0; end < n / kMomentLanes * kMomentLanes; i = end) {
    end = HWY_MIN(i + kMomentsTile, n / kMomentLanes * kMomentLanes);
    for (size_t lane = 0; lane < kMomentLanes; lane += 4 * lanes) {
      double* sum = sums.sum + lane;
      double* squares = sums.squares + lane;
      auto sum0 = hn::LoadU(d, sum);
      auto sum1 = hn::LoadU(d, sum + lanes);
      auto sum2 = hn::LoadU(d, sum + 2 * lanes);
      auto sum3 = hn::LoadU(d, sum + 3 * lanes);
      auto squares0 = hn::LoadU(d, squares);
      auto squares1 = hn::LoadU(d, squares + lanes);
      auto squares2 = hn::LoadU(d, squares + 2 * lanes);
      auto squares3 = hn::LoadU(d, squares + 3 * lanes);
      for (const float* at = x + i + lane; at < x + end; at += kMomentLanes) {
        const auto x0 = hn::PromoteTo(d, hn::LoadU(d32, at));
        const auto x1 = hn::PromoteTo(d, hn::LoadU(d32, at + lanes));
        const auto x2 = hn::PromoteTo(d, hn::LoadU(d32, at + 2 * lanes));
        const auto x3 = hn::PromoteTo(d, hn::LoadU(d32, at + 3 * lanes));
        sum0 = hn::Add(sum0, x0);
        sum1 = hn::Add(sum1, x1);
        sum2 = hn::Add(sum2, x2);
        sum3 = hn::Add(sum3, x3);
        // The square of a float is exact in a double, so a fused addition gives the same bits.
        squares0 = hn::MulAdd(x0, x0, squares0);
        squares1 = hn::MulAdd(x1, x1, squares1);
        squares2 = hn::MulAdd(x2, x2, squares2);
        squares3 = hn::MulAdd(x3, x3, squares3);
        const auto lower = hn::Abs(hn::LoadU(both, at));
        const auto upper = hn::Abs(hn::LoadU(both, at + 2 * lanes));
        largest0 = hn::Max(largest0, hn::BitCast(di32, lower));
        largest1 = hn::Max(largest1, hn::BitCast(di32, upper));
      }
      hn::StoreU(sum0, d, sum);
      hn::StoreU(sum1, d, sum + lanes);
      hn::StoreU(sum2, d, sum + 2 * lanes);
      hn::StoreU(sum3, d, sum + 3 * lanes);
      hn::StoreU(squares0, d, squares);
      hn::StoreU(squares1, d, squares + lanes);
      hn::StoreU(squares2, d, squares + 2 * lanes);
      hn::StoreU(squares3, d, squares + 3 * lanes);
    }
  }
  const auto largest = hn::MaxOfLanes(di32, hn::Max(largest0, largest1));
  sums.largest = static_cast<uint32_t>(hn::GetLane(largest));
  for (; i < n; ++i) sums.add(i, x[i]);
  return sums.total();
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
