// Trits added to integers, for one SIMD target. Contracts: stages/kernels.def.

#include <algorithm>
#include <cstring>

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/trits/trit.h"
#include "stages/trits/two_bits.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// Bytes, and then sums, in vectors of 16.
using TritSumTag = hn::FixedTag<uint8_t, 16>;
using TritSumVec = hn::Vec<TritSumTag>;
constexpr size_t kSumLanes = 16;

// Calls add(bytes, sums) for each 16 bytes, which hold `per_byte` trits each; the last bytes are
// copied and padded with the byte `zeros`. false if padding trits are not 0.
template <size_t per_byte, class Add>
HWY_INLINE bool add_blocks(const uint8_t* packed, size_t n, uint8_t zeros, int8_t* sums, Add add) {
  constexpr size_t kBlock = kSumLanes * per_byte;
  size_t i = 0;
  for (; i + kBlock <= n; i += kBlock) add(packed + i / per_byte, sums + i);
  if (i == n) return true;
  uint8_t last[kSumLanes];
  int8_t last_sums[kBlock] = {};
  std::fill_n(last, kSumLanes, zeros);
  std::memcpy(last, packed + i / per_byte, (n - i + per_byte - 1) / per_byte);
  std::memcpy(last_sums, sums + i, n - i);
  add(last, last_sums);
  std::memcpy(sums + i, last_sums, n - i);
  return std::all_of(last_sums + (n - i), last_sums + kBlock, [](int8_t sum) { return sum == 0; });
}

// sums += digits - 1
HWY_INLINE void add_digits(TritSumVec digits, int8_t* sums) {
  const TritSumTag d8;
  auto* to = reinterpret_cast<uint8_t*>(sums);
  const auto less_one = hn::Sub(hn::LoadU(d8, to), hn::Set(d8, 1));
  hn::StoreU(hn::Add(less_one, digits), d8, to);
}

// For each of the 80 trits in 16 packed bytes: the byte that holds it, and 256 * 3^place.
struct TritPlaces {
  alignas(16) uint8_t byte[kTritsPerByte][kSumLanes] = {};
  alignas(16) uint16_t power[kTritsPerByte][kSumLanes] = {};

  constexpr TritPlaces() {
    for (size_t i = 0; i < kTritsPerByte * kSumLanes; ++i) {
      const int place = static_cast<int>(i % kTritsPerByte);
      byte[i / kSumLanes][i % kSumLanes] = static_cast<uint8_t>(i / kTritsPerByte);
      power[i / kSumLanes][i % kSumLanes] =
          static_cast<uint16_t>(256 * trit_weight(0) / trit_weight(place));
    }
  }
};
inline constexpr TritPlaces kTritPlaces;

// ceil(v * 256 / 243) of each byte: the five digits to base 3 as a fraction.
HWY_INLINE TritSumVec fractions(TritSumVec packed) {
  const TritSumTag d8;
  const hn::RepartitionToWide<TritSumTag> d16;
  const auto zero = hn::Zero(d8);
  // v + ceil(13 v / 243); the quotient is exact for these v.
  const auto widened = [&](auto v) HWY_ATTR {
    const auto t = hn::Add(hn::Mul(v, hn::Set(d16, 13)), hn::Set(d16, 242));
    return hn::Add(v, hn::ShiftRight<7>(hn::MulHigh(t, hn::Set(d16, 34522))));
  };
  const auto lower = widened(hn::BitCast(d16, hn::InterleaveLower(d8, packed, zero)));
  const auto upper = widened(hn::BitCast(d16, hn::InterleaveUpper(d8, packed, zero)));
  return hn::ConcatEven(d8, hn::BitCast(d8, upper), hn::BitCast(d8, lower));
}

bool add_trits(const uint8_t* packed, size_t n, int8_t* sums) {
  const TritSumTag d8;
  const hn::RepartitionToWide<TritSumTag> d16;
  const auto zero = hn::Zero(d8);
  const auto three = hn::Set(d16, 3);
  auto largest = zero;
  const bool padding_is_zero = add_blocks<kTritsPerByte>(
      packed, n, kZeroByte, sums, [&](const uint8_t* from, int8_t* to) HWY_ATTR {
        const auto bytes = hn::LoadU(d8, from);
        largest = hn::Max(largest, bytes);
        const auto fraction = fractions(bytes);
        for (size_t i = 0; i < kTritsPerByte; ++i) {
          const auto own = hn::TableLookupBytes(fraction, hn::Load(d8, kTritPlaces.byte[i]));
          const auto digit = [&](auto v, const uint16_t* power) HWY_ATTR {
            // The fraction without the digits before `place`; 3 times this gives the digit.
            return hn::BitCast(d8, hn::MulHigh(hn::Mul(v, hn::Load(d16, power)), three));
          };
          const auto lower =
              digit(hn::BitCast(d16, hn::InterleaveLower(d8, own, zero)), kTritPlaces.power[i]);
          const auto upper = digit(hn::BitCast(d16, hn::InterleaveUpper(d8, own, zero)),
                                   kTritPlaces.power[i] + kSumLanes / 2);
          add_digits(hn::ConcatEven(d8, upper, lower), to + i * kSumLanes);
        }
      });
  const auto allowed = hn::Set(d8, kLargestPackedByte);
  return padding_is_zero && hn::AllTrue(d8, hn::Eq(hn::Max(largest, allowed), allowed));
}

bool add_two_bits(const uint8_t* packed, size_t n, int8_t* sums) {
  const TritSumTag d8;
  const auto zero = hn::Zero(d8);
  // Each byte four times, and in each the bit that stands for +1.
  alignas(16) constexpr uint8_t kFourTimes[kSumLanes] = {0, 0, 0, 0, 1, 1, 1, 1,
                                                         2, 2, 2, 2, 3, 3, 3, 3};
  alignas(16) constexpr uint8_t kPlus[kSumLanes] = {1, 4, 16, 64, 1, 4, 16, 64,
                                                    1, 4, 16, 64, 1, 4, 16, 64};
  const auto places = hn::Load(d8, kFourTimes);
  const auto plus = hn::Load(d8, kPlus);
  const auto minus = hn::Add(plus, plus);
  auto both = zero;  // bits of codes that are 3
  const bool padding_is_zero =
      add_blocks<kTwoBitTrits>(packed, n, 0, sums, [&](const uint8_t* from, int8_t* to) HWY_ATTR {
        const auto bytes = hn::LoadU(d8, from);
        both = hn::Or(both, hn::And(bytes, hn::ShiftRight<1>(bytes)));
        for (size_t i = 0; i < kTwoBitTrits; ++i) {
          const auto from_byte = hn::Add(places, hn::Set(d8, static_cast<uint8_t>(4 * i)));
          const auto own = hn::TableLookupBytes(bytes, from_byte);
          // A mask is -1 where it is set.
          const auto is_plus = hn::VecFromMask(d8, hn::Eq(hn::And(own, plus), plus));
          const auto is_minus = hn::VecFromMask(d8, hn::Eq(hn::And(own, minus), minus));
          auto* at = reinterpret_cast<uint8_t*>(to + i * kSumLanes);
          const auto sum = hn::LoadU(d8, at);
          hn::StoreU(hn::Add(hn::Sub(sum, is_plus), is_minus), d8, at);
        }
      });
  return padding_is_zero && hn::AllTrue(d8, hn::Eq(hn::And(both, hn::Set(d8, 0x55)), zero));
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
