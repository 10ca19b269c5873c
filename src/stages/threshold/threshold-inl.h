// Values that reach a threshold, for one SIMD target. Contracts: stages/kernels.def.

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/residual_access-inl.h"
#include "stages/threshold/threshold_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

void threshold_bits(const float* x, size_t n, float t, uint64_t* mask) {
  const hn::CappedTag<float, 16> d;
  const auto least = hn::Set(d, t);
  const auto large = [&](size_t i) HWY_ATTR { return hn::Ge(hn::Abs(hn::LoadU(d, x + i)), least); };
  const size_t whole = n / 64 * 64;
  store_mask_bits(d, whole, reinterpret_cast<uint8_t*>(mask), large);
  scalar::threshold_bits(x + whole, n - whole, t, mask + whole / 64);
}

size_t take_large(const float* x, ResidualValues r, size_t n, float t, uint64_t* mask, float* out) {
  const size_t whole = n / 64 * 64;
  const size_t taken = with_residual(r, [=](auto residual) HWY_ATTR {
    const hn::CappedTag<float, 16> d;
    const auto least = hn::Set(d, t);
    size_t count = 0;
    store_mask_bits(d, whole, reinterpret_cast<uint8_t*>(mask), [&](size_t i) HWY_ATTR {
      const auto b = residual.add(d, hn::LoadU(d, x + i), i);
      const auto large = hn::Ge(hn::Abs(b), least);
      residual.set(d, hn::IfThenZeroElse(large, b), i);
      // No more values are kept than were read, so the vector ends within `out`.
      hn::StoreU(compress_lanes(d, b, large), d, out + count);
      count += hn::CountTrue(d, large);
      return large;
    });
    return count;
  });
  return taken +
         scalar::take_large(x + whole, r.from(whole), n - whole, t, mask + whole / 64, out + taken);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
