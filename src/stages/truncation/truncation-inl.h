// Floats whose low bits are cut off, for one SIMD target. Contracts: stages/kernels.def.

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/output-inl.h"
#include "stages/truncation/truncation.h"
#include "stages/truncation/truncation_scalar.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// The lowest byte of each lane, stored.
template <class D32, class V>
HWY_INLINE void store_bytes(D32, V lanes, uint8_t* to) {
  const hn::Rebind<uint8_t, D32> d8;
  const hn::RebindToSigned<D32> di32;
  // Not TruncateTo: Highway 1.0.3 takes wrong bytes there with AVX3_DL.
  const auto bytes = hn::BitCast(di32, hn::And(lanes, hn::Set(D32(), 0xff)));
  hn::StoreU(hn::DemoteTo(d8, bytes), d8, to);
}

void truncate_encode(const float* x, size_t n, uint32_t low_bits, uint8_t* high, uint8_t* low) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> d32;
  const size_t lanes = hn::Lanes(d);
  const auto load = [=](size_t i) HWY_ATTR { return hn::BitCast(d32, hn::LoadU(d, x + i)); };
  size_t i = 0;
  if (low_bits == 2) {
    // Four vectors make one of bytes with two bits each, whose lanes of 32 bits become bytes.
    const auto field = hn::Set(d32, 3);
    for (; i + kLowFields * lanes <= n; i += kLowFields * lanes) {
      HWY_ALIGN uint8_t fields[kLowFields * hn::MaxLanes(d)];
      for (size_t k = 0; k < kLowFields; ++k) {
        const auto bits = load(i + k * lanes);
        store_bytes(d32, hn::ShiftRight<24>(bits), high + i + k * lanes);
        store_bytes(d32, hn::And(hn::ShiftRight<22>(bits), field), fields + k * lanes);
      }
      const auto four = hn::LoadU(d32, reinterpret_cast<const uint32_t*>(fields));
      const auto two = hn::Or(four, hn::ShiftRight<6>(four));
      store_bytes(d32, hn::Or(two, hn::ShiftRight<12>(two)), low + i / kLowFields);
    }
    scalar::truncate_encode(x + i, n - i, low_bits, high + i, low + i / kLowFields);
    return;
  }
  for (; i + lanes <= n; i += lanes) {
    const auto bits = load(i);
    store_bytes(d32, hn::ShiftRight<24>(bits), high + i);
    if (low_bits == 8) store_bytes(d32, hn::ShiftRight<16>(bits), low + i);
  }
  scalar::truncate_encode(x + i, n - i, low_bits, high + i, low_bits == 8 ? low + i : nullptr);
}

bool truncate_decode(const uint8_t* high, const uint8_t* low, size_t n, uint32_t low_bits,
                     float* out, DecodeMode mode) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> d32;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const size_t lanes = hn::Lanes(d);
  const auto load = [=](const uint8_t* from)
                        HWY_ATTR { return hn::PromoteTo(d32, hn::LoadU(d8, from)); };
  if (low_bits != 2) {
    const size_t i = put_vectors(out, n, mode, [=](auto, size_t at) HWY_ATTR {
      auto bits = hn::ShiftLeft<24>(load(high + at));
      if (low_bits == 8) bits = hn::Or(bits, hn::ShiftLeft<16>(load(low + at)));
      return hn::BitCast(d, bits);
    });
    return scalar::truncate_decode(high + i, low_bits == 8 ? low + i : nullptr, n - i, low_bits,
                                   out + i, mode);
  }
  const size_t block = kLowFields * lanes;
  const size_t whole = n / block * block;
  with_output(out, mode, [=](auto to) HWY_ATTR {
    const auto field = hn::Set(d32, 0x03030303);
    for (size_t i = 0; i < whole; i += block) {
      // Each byte of four fields becomes four bytes of one.
      const auto one = load(low + i / kLowFields);
      const auto two = hn::Or(one, hn::ShiftLeft<12>(one));
      const auto four = hn::And(hn::Or(two, hn::ShiftLeft<6>(two)), field);
      HWY_ALIGN uint8_t fields[kLowFields * hn::MaxLanes(d)];
      hn::StoreU(four, d32, reinterpret_cast<uint32_t*>(fields));
      for (size_t k = 0; k < block; k += lanes) {
        const auto bits =
            hn::Or(hn::ShiftLeft<24>(load(high + i + k)), hn::ShiftLeft<22>(load(fields + k)));
        to.put(d, hn::BitCast(d, bits), i + k);
      }
    }
  });
  return scalar::truncate_decode(high + whole, low + whole / kLowFields, n - whole, low_bits,
                                 out + whole, mode);
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
