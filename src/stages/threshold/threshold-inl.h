// Values that reach a threshold, for one SIMD target. Contracts: stages/kernels.def.

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/residual_access-inl.h"
#include "stages/threshold/threshold_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

void threshold_bits(const float* x, size_t n, float t, uint64_t* mask) {
  const hn::CappedTag<float, 16> d;
  const auto least = hn::Set(d, t);
  const auto large = [&](size_t i) HWY_ATTR { return hn::Ge(hn::Abs(hn::LoadU(d, x + i)), least); };
  const size_t whole = n / 64 * 64;
  store_mask_bits(d, whole, reinterpret_cast<uint8_t*>(mask), large);
  scalar::threshold_bits(x + whole, n - whole, t, mask + whole / 64);
}

template <class Residual>
HWY_INLINE size_t take_large_of(const float* x, Residual residual, size_t n, float t,
                                uint64_t* mask, float* out) {
  const hn::CappedTag<float, 16> d;
  const auto least = hn::Set(d, t);
  size_t count = 0;
  const auto take = [&](size_t i) HWY_ATTR {
    const auto b = residual.add(d, hn::LoadU(d, x + i), i);
    const auto large = hn::Ge(hn::Abs(b), least);
    residual.set(d, hn::IfThenZeroElse(large, b), i);
    // No more values are kept than were read, so the vector ends within `out`.
    hn::StoreU(compress_lanes(d, b, large), d, out + count);
    count += hn::CountTrue(d, large);
    return large;
  };
  const size_t whole = n / 64 * 64;
  store_mask_bits(d, whole, reinterpret_cast<uint8_t*>(mask), take);
  return count + scalar::take_each_large(x + whole, residual.from(whole), n - whole, t,
                                         mask + whole / 64, out + count);
}

size_t take_large(const float* x, ResidualValues r, size_t n, float t, uint64_t* mask, float* out) {
  return with_residual(
      r, [=](auto residual) HWY_ATTR { return take_large_of(x, residual, n, t, mask, out); });
}

// Few bits are set, so taking the values one by one is faster than compressing vectors of which
// most keep no value.
size_t compress(const float* x, const uint64_t* mask, size_t n, float* out) {
  size_t count = 0;
  for (size_t word = 0; word * 64 < n; ++word) {
    for (uint64_t bits = mask[word]; bits != 0; bits &= bits - 1) {
      out[count++] = x[word * 64 + static_cast<size_t>(__builtin_ctzll(bits))];
    }
  }
  return count;
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
