// 255 levels, for one SIMD target. Contracts: stages/kernels.def.

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/output-inl.h"
#include "stages/element/residual_access-inl.h"
#include "stages/int8/int8_rounding.h"
#include "stages/int8/int8_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

template <class Residual>
HWY_INLINE void quantize_int8_of(const float* x, Residual residual, size_t n, float unit,
                                 int8_t* q) {
  if (unit == 0.0f) return scalar::quantize_each_int8(x, residual, n, unit, q);
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di32;
  const hn::Rebind<int8_t, decltype(d)> d8;
  const size_t lanes = hn::Lanes(d);
  const auto units = hn::Set(d, unit);
  const auto limit = hn::Set(d, static_cast<float>(kInt8Levels));
  const auto negative_limit = hn::Neg(limit);
  const auto magic = hn::Set(d, kRoundingMagic);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto b = residual.add(d, hn::LoadU(d, x + i), i);
    const auto level = hn::Div(b, units);
    const auto clamped = hn::Min(hn::Max(level, negative_limit), limit);
    const auto shifted = hn::Add(clamped, magic);
    const auto integer = hn::Sub(hn::BitCast(di32, shifted), hn::BitCast(di32, magic));
    hn::StoreU(hn::DemoteTo(d8, integer), d8, q + i);
    residual.set(d, hn::Sub(b, hn::Mul(hn::Sub(shifted, magic), units)), i);
  }
  scalar::quantize_each_int8(x + i, residual.from(i), n - i, unit, q + i);
}

void quantize_int8(const float* x, ResidualValues r, size_t n, float unit, int8_t* q) {
  with_residual(r, [=](auto residual) HWY_ATTR { quantize_int8_of(x, residual, n, unit, q); });
}

// false if a q is -128.
template <class Output>
HWY_INLINE bool dequantize_int8_to(const int8_t* q, size_t n, float unit, Output out) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di32;
  const hn::Rebind<int8_t, decltype(d)> d8;
  const size_t lanes = hn::Lanes(d);
  const auto units = hn::Set(d, unit);
  auto lowest = hn::Zero(di32);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto level = hn::PromoteTo(di32, hn::LoadU(d8, q + i));
    lowest = hn::Min(lowest, level);
    out.put(d, hn::Mul(hn::ConvertTo(d, level), units), i);
  }
  const bool valid = hn::AllTrue(di32, hn::Gt(lowest, hn::Set(di32, -kInt8Levels - 1)));
  return scalar::dequantize_each_int8(q, i, n, unit, out) && valid;
}

bool dequantize_int8(const int8_t* q, size_t n, float unit, float* out, DecodeMode mode) {
  return with_output(out, mode,
                     [=](auto to) HWY_ATTR { return dequantize_int8_to(q, n, unit, to); });
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
