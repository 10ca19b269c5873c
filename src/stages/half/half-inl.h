// 16-bit floats, for one SIMD target. Contracts: stages/kernels.def.
//
// Binary16 is converted by integer arithmetic, as conversion instructions don't exist everywhere
// and differ in the NaNs that they make. Only where x86 has an instruction that narrows is it used:
// there, NaNs alone need care.

#include "hwy/highway.h"

#include "stages/element/bfloat16.h"
#include "stages/element/float_bits.h"
#include "stages/element/load-inl.h"
#include "stages/element/output-inl.h"
#include "stages/half/float16.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

struct Bfloat16 {
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> first, hn::Vec<D> second, uint16_t* to) {
    store_narrowed(d, first, second, to);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint16_t* from) {
    return load_widened(d, from);
  }
  static uint16_t narrow(float x) { return gradwire::narrow_bf16(x); }
  static float widen(uint16_t x) { return gradwire::widen_bf16(x); }
};

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

struct Float16 {
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> first, hn::Vec<D> second, uint16_t* to) {
    store_narrowed_f16(d, first, to);
    store_narrowed_f16(d, second, to + hn::Lanes(d));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint16_t* from) {
    return load_widened_f16(d, from);
  }
  static uint16_t narrow(float x) { return gradwire::narrow_f16(x); }
  static float widen(uint16_t x) { return gradwire::widen_f16(x); }
};

// Half::store and Half::load convert vectors, Half::narrow and Half::widen elements.
template <class Half>
HWY_INLINE void narrow_to(const float* x, size_t n, uint16_t* out) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    Half::store(d, hn::LoadU(d, x + i), hn::LoadU(d, x + i + lanes), out + i);
  }
  for (; i < n; ++i) store_unaligned(out + i, Half::narrow(x[i]));
}

template <class Half>
HWY_INLINE void widen_to(const uint16_t* x, size_t n, float* out, DecodeMode mode) {
  with_output(out, mode, [=](auto to) HWY_ATTR {
    const hn::ScalableTag<float> d;
    const size_t lanes = hn::Lanes(d);
    size_t i = 0;
    for (; i + lanes <= n; i += lanes) to.put(d, Half::load(d, x + i), i);
    for (; i < n; ++i) to.put(Half::widen(load_unaligned(x + i)), i);
  });
}

void narrow_bf16(const float* x, size_t n, uint16_t* out) { narrow_to<Bfloat16>(x, n, out); }

void widen_bf16(const uint16_t* x, size_t n, float* out, DecodeMode mode) {
  widen_to<Bfloat16>(x, n, out, mode);
}

void narrow_f16(const float* x, size_t n, uint16_t* out) { narrow_to<Float16>(x, n, out); }

void widen_f16(const uint16_t* x, size_t n, float* out, DecodeMode mode) {
  widen_to<Float16>(x, n, out, mode);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
