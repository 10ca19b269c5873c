// 255 levels, for one SIMD target. Contracts: stages/kernels.h.

#if defined(GRADWIRE_STAGES_INT8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_INT8_INL_H_
#undef GRADWIRE_STAGES_INT8_INL_H_
#else
#define GRADWIRE_STAGES_INT8_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"

#include "stages/int8.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

void quantize_int8(const float* b, size_t n, float unit, int8_t* out) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di32;
  const hn::Rebind<int8_t, decltype(d)> d8;
  const size_t lanes = hn::Lanes(d);
  if (unit == 0.0f) {
    if (n != 0) std::memset(out, 0, n);
    return;
  }
  const auto units = hn::Set(d, unit);
  const auto limit = hn::Set(d, static_cast<float>(kInt8Levels));
  const auto negative_limit = hn::Neg(limit);
  const auto magic = hn::Set(d, kRoundingMagic);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto level = hn::Div(hn::LoadU(d, b + i), units);
    const auto clamped = hn::Min(hn::Max(level, negative_limit), limit);
    const auto shifted = hn::BitCast(di32, hn::Add(clamped, magic));
    const auto q = hn::Sub(shifted, hn::BitCast(di32, magic));
    hn::StoreU(hn::DemoteTo(d8, q), d8, out + i);
  }
  for (; i < n; ++i) out[i] = gradwire::quantize_int8(b[i], unit);
}

// Calls put(d, i, values) for the values from i on, one(i, value) for the last few. false if a q is
// -128.
template <typename Vectors, typename One>
HWY_INLINE bool dequantize_int8_with(const int8_t* q, size_t n, float unit, Vectors put, One one) {
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
    put(d, i, hn::Mul(hn::ConvertTo(d, level), units));
  }
  bool valid = hn::AllTrue(di32, hn::Gt(lowest, hn::Set(di32, -kInt8Levels - 1)));
  for (; i < n; ++i) {
    valid &= q[i] >= -kInt8Levels;
    one(i, int8_value(q[i], unit));
  }
  return valid;
}

bool dequantize_int8(const int8_t* q, size_t n, float unit, float* out) {
  return dequantize_int8_with(
      q, n, unit, [=](auto d, size_t i, auto values) HWY_ATTR { hn::StoreU(values, d, out + i); },
      [=](size_t i, float value) { out[i] = value; });
}

bool dequantize_int8_add(const int8_t* q, size_t n, float unit, float* out) {
  return dequantize_int8_with(
      q, n, unit,
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
