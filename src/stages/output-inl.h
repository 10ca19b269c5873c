// Where decoded values go, for one SIMD target: stored, or added to what is there.

#if defined(GRADWIRE_STAGES_OUTPUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_OUTPUT_INL_H_
#undef GRADWIRE_STAGES_OUTPUT_INL_H_
#else
#define GRADWIRE_STAGES_OUTPUT_INL_H_
#endif

#include "hwy/highway.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

struct StoreTo {
  float* out;
  template <class D>
  HWY_INLINE void put(D d, hn::Vec<D> values, size_t i) const {
    hn::StoreU(values, d, out + i);
  }
  HWY_INLINE void put(float value, size_t i) const { out[i] = value; }
};

struct AddTo {
  float* out;
  template <class D>
  HWY_INLINE void put(D d, hn::Vec<D> values, size_t i) const {
    hn::StoreU(hn::Add(hn::LoadU(d, out + i), values), d, out + i);
  }
  HWY_INLINE void put(float value, size_t i) const { out[i] += value; }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
