// Signs and the sums of either, for one SIMD target. Contracts: stages/kernels.h.

#if defined(GRADWIRE_STAGES_SIGNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_SIGNS_INL_H_
#undef GRADWIRE_STAGES_SIGNS_INL_H_
#else
#define GRADWIRE_STAGES_SIGNS_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"

#include "stages/load-inl.h"
#include "stages/signs.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

void add_sign_sums(const float* b, size_t n, SignLanes& sums) {
  const hn::CappedTag<double, kMomentLanes / 2> d;
  const hn::Rebind<float, decltype(d)> d32;
  const size_t lanes = hn::Lanes(d);
  const size_t whole = n / kMomentLanes * kMomentLanes;
  const auto zero = hn::Zero(d);
  for (size_t lane = 0; lane < kMomentLanes; lane += 2 * lanes) {
    auto positive0 = hn::LoadU(d, sums.positive + lane);
    auto positive1 = hn::LoadU(d, sums.positive + lane + lanes);
    auto negative0 = hn::LoadU(d, sums.negative + lane);
    auto negative1 = hn::LoadU(d, sums.negative + lane + lanes);
    size_t negatives = 0;
    for (size_t at = lane; at < whole; at += kMomentLanes) {
      const auto x0 = hn::PromoteTo(d, hn::LoadU(d32, b + at));
      const auto x1 = hn::PromoteTo(d, hn::LoadU(d32, b + at + lanes));
      const auto below0 = hn::Lt(x0, zero);
      const auto below1 = hn::Lt(x1, zero);
      positive0 = hn::Add(positive0, hn::IfThenZeroElse(below0, x0));
      positive1 = hn::Add(positive1, hn::IfThenZeroElse(below1, x1));
      negative0 = hn::Add(negative0, hn::IfThenElseZero(below0, x0));
      negative1 = hn::Add(negative1, hn::IfThenElseZero(below1, x1));
      negatives += hn::CountTrue(d, below0) + hn::CountTrue(d, below1);
    }
    hn::StoreU(positive0, d, sums.positive + lane);
    hn::StoreU(positive1, d, sums.positive + lane + lanes);
    hn::StoreU(negative0, d, sums.negative + lane);
    hn::StoreU(negative1, d, sums.negative + lane + lanes);
    sums.negatives += negatives;
  }
  for (size_t i = whole; i < n; ++i) sums.add(i, b[i]);
}

void pack_signs(const float* b, size_t n, uint8_t* bits) {
  const hn::CappedTag<float, 64> d;
  const size_t lanes = hn::Lanes(d);
  const auto zero = hn::Zero(d);
  size_t i = 0;
  if (lanes >= 8) {
    for (; i + lanes <= n; i += lanes) {
      hn::StoreMaskBits(d, hn::Lt(hn::LoadU(d, b + i), zero), bits + i / 8);
    }
  } else {
    for (; i + 8 <= n; i += 8) {
      const uint64_t lower = bits_of_mask(d, hn::Lt(hn::LoadU(d, b + i), zero));
      const uint64_t upper = bits_of_mask(d, hn::Lt(hn::LoadU(d, b + i + 4), zero));
      bits[i / 8] = static_cast<uint8_t>(lower | upper << 4);
    }
  }
  for (; i < n; ++i) {
    if (i % 8 == 0) bits[i / 8] = 0;
    bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | (b[i] < 0.0f ? 1 : 0) << i % 8);
  }
}

// Calls put(d, i, values) for the values from i on, one(i, value) for the last few.
template <typename Vectors, typename One>
HWY_INLINE bool unpack_signs_with(const uint8_t* bits, size_t n, SignMeans means, Vectors put,
                                  One one) {
  constexpr size_t kAtOnce = 16;
  const hn::CappedTag<float, kAtOnce> d;
  const hn::RebindToUnsigned<decltype(d)> d32;
  const size_t lanes = hn::Lanes(d);
  const auto positive = hn::Set(d, means.positive);
  const auto negative = hn::Set(d, means.negative);
  const auto bit = hn::Shl(hn::Set(d32, 1), hn::Iota(d32, 0));
  size_t i = 0;
  for (; i + kAtOnce <= n; i += kAtOnce) {
    const auto both = static_cast<uint32_t>(bits[i / 8] | bits[i / 8 + 1] << 8);
    for (size_t at = 0; at < kAtOnce; at += lanes) {
      const auto below = hn::RebindMask(d, hn::TestBit(hn::Set(d32, both >> at), bit));
      put(d, i + at, hn::IfThenElse(below, negative, positive));
    }
  }
  for (; i < n; ++i) one(i, (bits[i / 8] >> i % 8 & 1) != 0 ? means.negative : means.positive);
  return n % 8 == 0 || bits[n / 8] >> n % 8 == 0;
}

bool unpack_signs(const uint8_t* bits, size_t n, SignMeans means, float* out) {
  return unpack_signs_with(
      bits, n, means,
      [=](auto d, size_t i, auto values) HWY_ATTR { hn::StoreU(values, d, out + i); },
      [=](size_t i, float value) { out[i] = value; });
}

bool unpack_signs_add(const uint8_t* bits, size_t n, SignMeans means, float* out) {
  return unpack_signs_with(
      bits, n, means,
      [=](auto d, size_t i, auto values)
          HWY_ATTR { hn::StoreU(hn::Add(hn::LoadU(d, out + i), values), d, out + i); },
      [=](size_t i, float value) { out[i] += value; });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
