// Loads and stores that Highway has no one-word name for, for one SIMD target.

#if defined(GRADWIRE_STAGES_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_LOAD_INL_H_
#undef GRADWIRE_STAGES_LOAD_INL_H_
#else
#define GRADWIRE_STAGES_LOAD_INL_H_
#endif

#include "hwy/highway.h"
#include "stages/element.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// As many bfloat16 as d has lanes, widened.
template <class D>
HWY_INLINE hn::Vec<D> load_widened(D d, const uint16_t* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
}

// narrow_bf16 of each lane, stored.
template <class D>
HWY_INLINE void store_narrowed(D d, hn::Vec<D> v, uint16_t* to) {
  const hn::RebindToUnsigned<D> d32;
  const hn::RebindToSigned<D> di32;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(d32, 0x7fff)), odd);
  const auto nan = hn::Or(hn::And(bits, hn::Set(d32, 0x80000000u)), hn::Set(d32, 0x7fc00000u));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  const auto upper = hn::ShiftRight<16>(hn::IfThenElse(is_nan, nan, rounded));
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di32, upper)), d16, to);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
