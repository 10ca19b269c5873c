// Values of a least magnitude, for one SIMD target. Contracts: stages/kernels.h.

#if defined(GRADWIRE_STAGES_THRESHOLD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_THRESHOLD_INL_H_
#undef GRADWIRE_STAGES_THRESHOLD_INL_H_
#else
#define GRADWIRE_STAGES_THRESHOLD_INL_H_
#endif

#include "hwy/highway.h"

#include "stages/element.h"
#include "stages/load-inl.h"
#include "stages/residual-inl.h"
#include "stages/threshold.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace {

void threshold_bits(const float* x, size_t n, float t, uint64_t* mask) {
  const hn::CappedTag<float, 16> d;
  const size_t lanes = hn::Lanes(d);
  const auto least = hn::Set(d, t);
  const auto large = [&](size_t i) HWY_ATTR { return hn::Ge(hn::Abs(hn::LoadU(d, x + i)), least); };
  auto* bytes = reinterpret_cast<uint8_t*>(mask);
  const size_t whole = n / 64 * 64;
  if (lanes >= 8) {
    for (size_t i = 0; i < whole; i += lanes) hn::StoreMaskBits(d, large(i), bytes + i / 8);
  } else {
    for (size_t i = 0; i < whole; i += 8) {
      bytes[i / 8] =
          static_cast<uint8_t>(bits_of_mask(d, large(i)) | bits_of_mask(d, large(i + 4)) << 4);
    }
  }
  if (whole == n) return;
  uint64_t last = 0;
  for (size_t i = whole; i < n; ++i) last |= uint64_t{reaches(x[i], t)} << i % 64;
  mask[whole / 64] = last;
}

template <class Residual>
HWY_INLINE size_t take_large_of(const float* x, Residual residual, size_t n, float t,
                                uint64_t* mask, float* out) {
  const hn::CappedTag<float, 16> d;
  const size_t lanes = hn::Lanes(d);
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
  auto* bytes = reinterpret_cast<uint8_t*>(mask);
  const size_t whole = n / 64 * 64;
  if (lanes >= 8) {
    for (size_t i = 0; i < whole; i += lanes) hn::StoreMaskBits(d, take(i), bytes + i / 8);
  } else {
    for (size_t i = 0; i < whole; i += 8) {
      const uint64_t lower = bits_of_mask(d, take(i));
      const uint64_t upper = bits_of_mask(d, take(i + 4));
      bytes[i / 8] = static_cast<uint8_t>(lower | upper << 4);
    }
  }
  return count + take_each_large(x + whole, residual.from(whole), n - whole, t, mask + whole / 64,
                                 out + count);
}

size_t take_large(const float* x, size_t n, float t, uint64_t* mask, float* out) {
  return take_large_of(x, NoResidual(), n, t, mask, out);
}

size_t take_large_f32(const float* x, float* r, size_t n, float t, uint64_t* mask, float* out) {
  return take_large_of(x, ResidualOf(r), n, t, mask, out);
}

size_t take_large_bf16(const float* x, uint16_t* r, size_t n, float t, uint64_t* mask, float* out) {
  return take_large_of(x, ResidualOf(r), n, t, mask, out);
}

// Few bits are set: taking them one by one is faster than vectors that keep none.
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
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
