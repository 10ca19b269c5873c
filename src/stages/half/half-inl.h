// 16-bit floats, for one SIMD target. Contracts: stages/kernels.def.
//
// Binary16 is converted by integer arithmetic, as conversion instructions don't exist everywhere
// and differ in the NaNs that they make. The one exception is x86's instruction that narrows, where
// only NaNs need care.

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/output-inl.h"
#include "stages/half/float16.h"
#include "stages/half/half_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2

// narrow_f16 of each lane, stored.
template <class D>
HWY_INLINE void store_narrowed_f16(D d, hn::Vec<D> v, uint16_t* to) {
  const hn::Rebind<hwy::float16_t, D> d16;
  // The instruction keeps the upper bits of a NaN's fraction: those of 0x7e00.
  hn::StoreU(hn::DemoteTo(d16, replace_nans(d, v)), d16, reinterpret_cast<hwy::float16_t*>(to));
}

#else

// narrow_f16 of each lane, stored; stages/half/float16.h explains the steps.
template <class D>
HWY_INLINE void store_narrowed_f16(D d, hn::Vec<D> v, uint16_t* to) {
  const hn::RebindToUnsigned<D> d32;
  const hn::RebindToSigned<D> di32;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto magnitude = hn::BitCast(di32, hn::And(bits, hn::Set(d32, 0x7fffffffu)));
  const auto sign = hn::ShiftRight<16>(hn::And(bits, hn::Set(d32, 0x80000000u)));
  const auto magic = hn::Set(di32, kF16DenormalMagic);
  const auto denormal =
      hn::Sub(hn::BitCast(di32, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, magic))), magic);
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di32, 1));
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(di32, 0xfff - kF16Rebias)), odd);
  const auto normal = hn::ShiftRight<13>(rounded);
  const auto large = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di32, 0x7f800000)),
                                    hn::Set(di32, 0x7e00), hn::Set(di32, 0x7c00));
  const auto finite =
      hn::IfThenElse(hn::Lt(magnitude, hn::Set(di32, kF16SmallestNormal)), denormal, normal);
  const auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di32, kF16Overflow)), finite, large);
  hn::StoreU(hn::DemoteTo(d16, hn::Or(result, hn::BitCast(di32, sign))), d16, to);
}

#endif

template <class D>
HWY_INLINE hn::Vec<D> load_widened_f16(D d, const uint16_t* from) {
  const hn::RebindToUnsigned<D> d32;
  const hn::RebindToSigned<D> di32;
  const hn::Rebind<uint16_t, D> d16;
  const auto half = hn::PromoteTo(d32, hn::LoadU(d16, from));
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(d32, 0x8000u)));
  const auto magnitude = hn::BitCast(di32, hn::ShiftLeft<13>(hn::And(half, hn::Set(d32, 0x7fffu))));
  const auto normal = hn::Add(magnitude, hn::Set(di32, kF16Rebias));
  const auto huge = hn::Add(normal, hn::Set(di32, kF16Rebias));
  const auto magic = hn::Set(di32, kF16SmallestNormal);
  const auto tiny =
      hn::BitCast(di32, hn::Sub(hn::BitCast(d, hn::Add(magnitude, magic)), hn::BitCast(d, magic)));
  auto bits = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di32, 0x400 << 13)), tiny, normal);
  bits = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di32, 0x7c00 << 13)), bits, huge);
  return hn::BitCast(d, hn::Or(hn::BitCast(d32, bits), sign));
}

// Calls store(d, first, second, i) for each two vectors of n values. Returns the index of the first
// value after them.
template <class Store>
HWY_INLINE size_t narrow_vectors(const float* x, size_t n, const Store& store) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    store(d, hn::LoadU(d, x + i), hn::LoadU(d, x + i + lanes), i);
  }
  return i;
}

void narrow_bf16(const float* x, size_t n, uint16_t* out) {
  const size_t i = narrow_vectors(x, n, [=](auto d, auto first, auto second, size_t at) HWY_ATTR {
    hn::StoreU(narrow_to_bf16(d, first, second), hn::Repartition<uint16_t, decltype(d)>(),
               out + at);
  });
  scalar::narrow_bf16(x + i, n - i, out + i);
}

void narrow_bf16_finite(const float* x, size_t n, uint16_t* out) {
  const size_t i = narrow_vectors(x, n, [=](auto d, auto first, auto second, size_t at) HWY_ATTR {
    store_residual(d, first, second, out + at);
  });
  scalar::narrow_bf16_finite(x + i, n - i, out + i);
}

void narrow_f16(const float* x, size_t n, uint16_t* out) {
  const size_t i = narrow_vectors(x, n, [=](auto d, auto first, auto second, size_t at) HWY_ATTR {
    store_narrowed_f16(d, first, out + at);
    store_narrowed_f16(d, second, out + at + hn::Lanes(d));
  });
  scalar::narrow_f16(x + i, n - i, out + i);
}

void widen_bf16(const uint16_t* x, size_t n, float* out, DecodeMode mode) {
  const size_t i = put_vectors(out, n, mode,
                               [=](auto d, size_t at) HWY_ATTR { return load_widened(d, x + at); });
  scalar::widen_bf16(x + i, n - i, out + i, mode);
}

void widen_f16(const uint16_t* x, size_t n, float* out, DecodeMode mode) {
  const size_t i = put_vectors(
      out, n, mode, [=](auto d, size_t at) HWY_ATTR { return load_widened_f16(d, x + at); });
  scalar::widen_f16(x + i, n - i, out + i, mode);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
