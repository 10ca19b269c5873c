// stages/element/output.h with vectors, for one SIMD target.

#if defined(GRADWIRE_STAGES_OUTPUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_OUTPUT_INL_H_
#undef GRADWIRE_STAGES_OUTPUT_INL_H_
#else
#define GRADWIRE_STAGES_OUTPUT_INL_H_
#endif

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/output.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

struct StoreTo : gradwire::StoreTo {
  using gradwire::StoreTo::put;
  template <class D>
  HWY_INLINE void put(D d, hn::Vec<D> values, size_t i) const {
    hn::StoreU(values, d, out + i);
  }
};

struct AddTo : gradwire::AddTo {
  using gradwire::AddTo::put;
  template <class D>
  HWY_INLINE void put(D d, hn::Vec<D> values, size_t i) const {
    hn::StoreU(hn::Add(hn::LoadU(d, out + i), values), d, out + i);
  }
};

template <class Body>
HWY_INLINE auto with_output(float* out, DecodeMode mode, const Body& body) {
  if (mode == DecodeMode::kAdd) return body(AddTo{{out}});
  return body(StoreTo{{out}});
}

// Puts vector(d, i) for whole vectors of n values. Returns the index of the first value after them.
template <class Vector>
HWY_INLINE size_t put_vectors(float* out, size_t n, DecodeMode mode, const Vector& vector) {
  const hn::ScalableTag<float> d;
  const size_t whole = n / hn::Lanes(d) * hn::Lanes(d);
  with_output(out, mode, [=](auto to) HWY_ATTR {
    for (size_t i = 0; i < whole; i += hn::Lanes(d)) to.put(d, vector(d, i), i);
  });
  return whole;
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
