// stages/element/residual_access.h with vectors, for one SIMD target.

#if defined(GRADWIRE_STAGES_ELEMENT_RESIDUAL_ACCESS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_ELEMENT_RESIDUAL_ACCESS_INL_H_
#undef GRADWIRE_STAGES_ELEMENT_RESIDUAL_ACCESS_INL_H_
#else
#define GRADWIRE_STAGES_ELEMENT_RESIDUAL_ACCESS_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/residual_access.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// The types of stages/element/residual_access.h, also for vectors that begin with element i.
// fetch_ahead() and fetch_values() are those of stages/element/load-inl.h.
struct NoResidual : gradwire::NoResidual {
  using gradwire::NoResidual::add;
  using gradwire::NoResidual::set;
  HWY_INLINE NoResidual from(size_t) const { return *this; }
  HWY_INLINE void fetch_ahead(size_t) const {}
  HWY_INLINE void fetch_values(size_t, size_t) const {}
  template <class D>
  HWY_INLINE hn::Vec<D> add(D, hn::Vec<D> x, size_t) const {
    return x;
  }
  template <class D>
  HWY_INLINE void set(D, hn::Vec<D>, size_t) const {}
  template <class D>
  HWY_INLINE void set(D, hn::Vec<D>, hn::Vec<D>, size_t) const {}
};

template <typename T>
struct ResidualOf : gradwire::ResidualOf<T> {
  using gradwire::ResidualOf<T>::r;
  using gradwire::ResidualOf<T>::add;
  using gradwire::ResidualOf<T>::set;
  explicit ResidualOf(T* residual) : gradwire::ResidualOf<T>(residual) {}
  HWY_INLINE ResidualOf from(size_t i) const { return ResidualOf(r + i); }
  HWY_INLINE void fetch_ahead(size_t i) const { HWY_NAMESPACE::fetch_ahead(r + i); }
  HWY_INLINE void fetch_values(size_t distance, size_t n) const {
    HWY_NAMESPACE::fetch_values(r, distance, n);
  }
  template <class D>
  HWY_INLINE hn::Vec<D> add(D d, hn::Vec<D> x, size_t i) const {
    return hn::Add(x, load_widened(d, r + i));
  }
  template <class D>
  HWY_INLINE void set(D d, hn::Vec<D> left, size_t i) const {
    store_residual(d, left, r + i);
  }
  // Two vectors, which begin with element i.
  template <class D>
  HWY_INLINE void set(D d, hn::Vec<D> first, hn::Vec<D> second, size_t i) const {
    store_residual(d, first, second, r + i);
  }
};

template <class Body>
HWY_INLINE auto with_residual(ResidualValues r, const Body& body) {
  if (r.f32 != nullptr) return body(ResidualOf<float>(r.f32));
  if (r.bf16 != nullptr) return body(ResidualOf<uint16_t>(r.bf16));
  return body(NoResidual());
}

// Calls body(x, residual) for a copy of n <= kRoom values and of their residuals, with zeros after
// them; then stores the residuals.
template <size_t kRoom, class Body>
HWY_INLINE void on_padded_copy(const float* x, NoResidual residual, size_t n, const Body& body) {
  float copied_x[kRoom] = {};
  std::memcpy(copied_x, x, n * sizeof *x);
  body(copied_x, residual);
}

template <size_t kRoom, typename T, class Body>
HWY_INLINE void on_padded_copy(const float* x, ResidualOf<T> residual, size_t n, const Body& body) {
  T copied_r[kRoom] = {};
  std::memcpy(copied_r, residual.r, n * sizeof *copied_r);
  on_padded_copy<kRoom>(x, NoResidual(), n, [&](const float* copied_x, NoResidual) HWY_ATTR {
    body(copied_x, ResidualOf<T>(copied_r));
  });
  std::memcpy(residual.r, copied_r, n * sizeof *copied_r);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
