// Largest magnitude, for one SIMD target. Contracts: stages/kernels.def.

#include "hwy/highway.h"

#include "stages/element/float_bits.h"
#include "stages/element/load-inl.h"
#include "stages/element/residual_access-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// The largest of the sign-cleared bits. Two halves are read in turns, because memory serves two
// sequential reads faster than one.
uint32_t absmax(const float* x, ResidualValues r, size_t n) {
  return with_residual(r, [=](auto residual) HWY_ATTR {
    const hn::ScalableTag<float> d;
    const hn::RebindToSigned<decltype(d)> di;
    const size_t lanes = hn::Lanes(d);
    // The sign bits are clear, so a signed maximum will do.
    const auto larger = [&](auto max, size_t i) HWY_ATTR {
      return hn::Max(max, hn::BitCast(di, hn::Abs(residual.add(d, hn::LoadU(d, x + i), i))));
    };
    auto max0 = hn::Zero(di);
    auto max1 = hn::Zero(di);
    auto max2 = hn::Zero(di);
    auto max3 = hn::Zero(di);
    const size_t half = n / 2 / kPageValues * kPageValues;
    for (size_t page = 0; page < half; page += kPageValues) {
      fetch_ahead(x + page);
      fetch_ahead(x + half + page);
      residual.fetch_ahead(page);
      residual.fetch_ahead(half + page);
      for (size_t i = page; i < page + kPageValues; i += 2 * lanes) {
        max0 = larger(max0, i);
        max1 = larger(max1, half + i);
        max2 = larger(max2, i + lanes);
        max3 = larger(max3, half + i + lanes);
      }
    }
    size_t i = 2 * half;
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      max0 = larger(max0, i);
      max1 = larger(max1, i + lanes);
    }
    const auto all = hn::Max(hn::Max(max0, max1), hn::Max(max2, max3));
    uint32_t max = static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, all)));
    for (; i < n; ++i) max = HWY_MAX(max, magnitude_bits(residual.add(x[i], i)));
    return max;
  });
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
