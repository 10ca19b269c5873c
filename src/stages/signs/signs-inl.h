// Signs and the sums of the values of either sign, for one SIMD target. Contracts:
// stages/kernels.def.

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/output-inl.h"
#include "stages/element/residual_access-inl.h"
#include "stages/magnitude/moments.h"
#include "stages/signs/signs.h"
#include "stages/signs/signs_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// sum + x where `mask` is set.
template <class D>
HWY_INLINE hn::Vec<D> add_where(D, hn::Vec<D> sum, hn::Mask<D> mask, hn::Vec<D> x) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return hn::Vec<D>{_mm512_mask_add_pd(sum.raw, mask.raw, sum.raw, x.raw)};
#else
  return hn::Add(sum, hn::IfThenElseZero(mask, x));
#endif
}

// Adds up to a page of values to the lanes from `lane` on: as many lanes as two vectors have.
template <class D, class Residual>
HWY_INLINE void add_to_lanes(D d, const float* x, Residual residual, size_t n, size_t lane,
                             SignLanes& sums) {
  const hn::Rebind<float, D> d32;
  const size_t lanes = hn::Lanes(d);
  const auto zero = hn::Zero(d);
  auto positive0 = hn::LoadU(d, sums.positive + lane);
  auto positive1 = hn::LoadU(d, sums.positive + lane + lanes);
  auto negative0 = hn::LoadU(d, sums.negative + lane);
  auto negative1 = hn::LoadU(d, sums.negative + lane + lanes);
  size_t negatives = 0;
  const auto b = [&](size_t i) HWY_ATTR {
    return hn::PromoteTo(d, residual.add(d32, hn::LoadU(d32, x + i), i));
  };
  for (size_t at = lane; at < n; at += kMomentLanes) {
    const auto b0 = b(at);
    const auto b1 = b(at + lanes);
    const auto below0 = hn::Lt(b0, zero);
    const auto below1 = hn::Lt(b1, zero);
    positive0 = add_where(d, positive0, hn::Not(below0), b0);
    positive1 = add_where(d, positive1, hn::Not(below1), b1);
    negative0 = add_where(d, negative0, below0, b0);
    negative1 = add_where(d, negative1, below1, b1);
    negatives += hn::CountTrue(d, below0) + hn::CountTrue(d, below1);
  }
  hn::StoreU(positive0, d, sums.positive + lane);
  hn::StoreU(positive1, d, sums.positive + lane + lanes);
  hn::StoreU(negative0, d, sums.negative + lane);
  hn::StoreU(negative1, d, sums.negative + lane + lanes);
  sums.negatives += negatives;
}

void add_sign_sums(const float* x, ResidualValues r, size_t n, SignLanes& sums) {
  const size_t whole = n / kMomentLanes * kMomentLanes;
  with_residual(r, [=, &sums](auto residual) HWY_ATTR {
    const hn::CappedTag<double, kMomentLanes / 2> d;
    for (size_t page = 0; page < whole; page += kPageValues) {
      fetch_ahead(x + page);
      residual.fetch_ahead(page);
      const size_t values = HWY_MIN(kPageValues, whole - page);
      for (size_t lane = 0; lane < kMomentLanes; lane += 2 * hn::Lanes(d)) {
        add_to_lanes(d, x + page, residual.from(page), values, lane, sums);
      }
    }
  });
  scalar::add_sign_sums(x + whole, r.from(whole), n - whole, sums);
}

// Number of values whose signs are handled at once.
constexpr size_t kSignsAtOnce = 16;

void pack_signs(const float* x, ResidualValues r, size_t n, SignMeans means, uint8_t* bits) {
  const size_t whole = n / kSignsAtOnce * kSignsAtOnce;
  with_residual(r, [=](auto residual) HWY_ATTR {
    const hn::CappedTag<float, kSignsAtOnce> d;
    const auto zero = hn::Zero(d);
    const auto positive = hn::Set(d, means.positive);
    const auto negative = hn::Set(d, means.negative);
    store_mask_bits(d, whole, bits, [&](size_t i) HWY_ATTR {
      const auto b = residual.add(d, hn::LoadU(d, x + i), i);
      const auto below = hn::Lt(b, zero);
      residual.set(d, hn::Sub(b, hn::IfThenElse(below, negative, positive)), i);
      return below;
    });
  });
  scalar::pack_signs(x + whole, r.from(whole), n - whole, means, bits + whole / 8);
}

bool unpack_signs(const uint8_t* bits, size_t n, SignMeans means, float* out, DecodeMode mode) {
  const size_t whole = n / kSignsAtOnce * kSignsAtOnce;
  with_output(out, mode, [=](auto to) HWY_ATTR {
    const hn::CappedTag<float, kSignsAtOnce> d;
    const hn::RebindToUnsigned<decltype(d)> d32;
    const auto positive = hn::Set(d, means.positive);
    const auto negative = hn::Set(d, means.negative);
    const auto bit = hn::Shl(hn::Set(d32, 1), hn::Iota(d32, 0));
    for (size_t i = 0; i < whole; i += kSignsAtOnce) {
      const auto both = static_cast<uint32_t>(bits[i / 8] | bits[i / 8 + 1] << 8);
      for (size_t at = 0; at < kSignsAtOnce; at += hn::Lanes(d)) {
        const auto below = hn::RebindMask(d, hn::TestBit(hn::Set(d32, both >> at), bit));
        to.put(d, hn::IfThenElse(below, negative, positive), i + at);
      }
    }
  });
  return scalar::unpack_signs(bits + whole / 8, n - whole, means, out + whole, mode);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
