// Sums and quotients of spans, for one SIMD target. Contracts: stages/kernels.def.

#include <cmath>
#include <cstdlib>

#include "hwy/highway.h"

#include "stages/arithmetic/arithmetic_scalar.h"
#include "stages/element/output-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

void sum(const float* a, const float* b, size_t n, float* out) {
  const size_t i = put_vectors(out, n, DecodeMode::kStore, [=](auto d, size_t at) HWY_ATTR {
    return hn::Add(hn::LoadU(d, a + at), hn::LoadU(d, b + at));
  });
  scalar::sum(a + i, b + i, n - i, out + i);
}

void subtract(const float* a, const float* b, size_t n, float* out) {
  const size_t i = put_vectors(out, n, DecodeMode::kStore, [=](auto d, size_t at) HWY_ATTR {
    return hn::Sub(hn::LoadU(d, a + at), hn::LoadU(d, b + at));
  });
  scalar::subtract(a + i, b + i, n - i, out + i);
}

void divide(float* x, size_t n, float divisor) {
  // A power of two has an exact reciprocal, and a product takes less time.
  int exponent = 0;
  const bool exact = std::frexp(divisor, &exponent) == 0.5f && std::abs(exponent) < 100;
  const float reciprocal = 1.0f / divisor;
  const size_t i = put_vectors(x, n, DecodeMode::kStore, [=](auto d, size_t at) HWY_ATTR {
    const auto value = hn::LoadU(d, x + at);
    return exact ? hn::Mul(value, hn::Set(d, reciprocal)) : hn::Div(value, hn::Set(d, divisor));
  });
  scalar::divide(x + i, n - i, divisor);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
