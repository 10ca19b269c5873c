// What error feedback keeps, as the loops of one SIMD target see it.

#if defined(GRADWIRE_STAGES_RESIDUAL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_RESIDUAL_INL_H_
#undef GRADWIRE_STAGES_RESIDUAL_INL_H_
#else
#define GRADWIRE_STAGES_RESIDUAL_INL_H_
#endif

#include "hwy/highway.h"

#include "stages/load-inl.h"
#include "stages/residual.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// As stages/residual.h, for vectors that begin with element i too. fetch_ahead() is that of
// stages/load-inl.h.
struct NoResidual : gradwire::NoResidual {
  using gradwire::NoResidual::add;
  using gradwire::NoResidual::set;
  explicit NoResidual(const float* = nullptr) {}
  HWY_INLINE NoResidual from(size_t) const { return *this; }
  HWY_INLINE void fetch_ahead(size_t) const {}
  template <class D>
  HWY_INLINE hn::Vec<D> add(D, hn::Vec<D> x, size_t) const {
    return x;
  }
  template <class D>
  HWY_INLINE void set(D, hn::Vec<D>, size_t) const {}
};

template <class D>
HWY_INLINE hn::Vec<D> load_residual(D d, const float* r) {
  return hn::LoadU(d, r);
}

template <class D>
HWY_INLINE hn::Vec<D> load_residual(D d, const uint16_t* r) {
  return load_widened(d, r);
}

template <class D>
HWY_INLINE void store_residual(D d, hn::Vec<D> left, float* r) {
  hn::StoreU(left, d, r);
}

template <class D>
HWY_INLINE void store_residual(D d, hn::Vec<D> left, uint16_t* r) {
  store_narrowed(d, left, r);
}

template <typename T>
struct ResidualOf : gradwire::ResidualOf<T> {
  using gradwire::ResidualOf<T>::r;
  using gradwire::ResidualOf<T>::add;
  using gradwire::ResidualOf<T>::set;
  explicit ResidualOf(T* residual) : gradwire::ResidualOf<T>(residual) {}
  HWY_INLINE ResidualOf from(size_t i) const { return ResidualOf(r + i); }
  HWY_INLINE void fetch_ahead(size_t i) const { HWY_NAMESPACE::fetch_ahead(r + i); }
  template <class D>
  HWY_INLINE hn::Vec<D> add(D d, hn::Vec<D> x, size_t i) const {
    return hn::Add(x, load_residual(d, r + i));
  }
  template <class D>
  HWY_INLINE void set(D d, hn::Vec<D> left, size_t i) const {
    store_residual(d, left, r + i);
  }
};

using ResidualF32 = ResidualOf<float>;
using ResidualBf16 = ResidualOf<uint16_t>;

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
