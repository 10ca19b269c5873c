// Sums and quotients of spans, for one SIMD target. Contracts: stages/kernels.def.

#include <cmath>
#include <cstdlib>

#include "hwy/highway.h"

#include "stages/arithmetic/arithmetic_scalar.h"
#include "stages/element/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// out[i] = vector(d, i) for whole vectors. Returns the index of the first value after them.
template <class Vector>
HWY_INLINE size_t fill_vectors(float* out, size_t n, const Vector& vector) {
  const hn::ScalableTag<float> d;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) hn::StoreU(vector(d, i), d, out + i);
  return i;
}

void sum(const float* a, const float* b, size_t n, float* out) {
  const size_t i = fill_vectors(out, n, [=](auto d, size_t at) HWY_ATTR {
    return hn::Add(hn::LoadU(d, a + at), hn::LoadU(d, b + at));
  });
  scalar::sum(a + i, b + i, n - i, out + i);
}

void subtract(const float* a, const float* b, size_t n, float* out) {
  const size_t i = fill_vectors(out, n, [=](auto d, size_t at) HWY_ATTR {
    return hn::Sub(hn::LoadU(d, a + at), hn::LoadU(d, b + at));
  });
  scalar::subtract(a + i, b + i, n - i, out + i);
}

void add_f32(const float* x, size_t n, float* out) {
  const size_t i = fill_vectors(out, n, [=](auto d, size_t at) HWY_ATTR {
    return hn::Add(hn::LoadU(d, out + at), hn::LoadU(d, x + at));
  });
  scalar::add_f32(x + i, n - i, out + i);
}

void divide(float* x, size_t n, float divisor) {
  // A power of two has an exact reciprocal, and a product takes less time.
  int exponent = 0;
  const bool exact = std::frexp(divisor, &exponent) == 0.5f && std::abs(exponent) < 100;
  const float reciprocal = 1.0f / divisor;
  const size_t i =
      exact ? fill_vectors(x, n,
                           [=](auto d, size_t at) HWY_ATTR {
                             return hn::Mul(hn::LoadU(d, x + at), hn::Set(d, reciprocal));
                           })
            : fill_vectors(x, n, [=](auto d, size_t at) HWY_ATTR {
                return hn::Div(hn::LoadU(d, x + at), hn::Set(d, divisor));
              });
  scalar::divide(x + i, n - i, divisor);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
