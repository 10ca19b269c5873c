// Random words, for one SIMD target. Contracts: stages/kernels.h.

#if defined(GRADWIRE_STAGES_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_PHILOX_INL_H_
#undef GRADWIRE_STAGES_PHILOX_INL_H_
#else
#define GRADWIRE_STAGES_PHILOX_INL_H_
#endif

#include "hwy/highway.h"

#include "base/philox.h"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

HWY_BEFORE_NAMESPACE();
namespace gradwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// Distance of each lane's block from the first, so that philox_words gives them in order.
template <class D>
HWY_INLINE hn::Vec<D> philox_places(D d) {
  const auto lane = hn::Iota(d, 0);
  const auto odd = hn::Ne(hn::And(lane, hn::Set(d, 1)), hn::Zero(d));
  return hn::Add(hn::ShiftRight<1>(lane), hn::IfThenElseZero(odd, hn::Set(d, hn::Lanes(d) / 2)));
}

// The words of the next 4 elements for each lane, from 4 * block on: first those in `lower`.
//
// Each 64-bit lane holds one block's word in its lower half; what is in the upper half does not
// matter, as a multiplication of 32-bit halves looks at the lower one alone.
template <class D>
HWY_INLINE void philox_words(D d, DrawStream stream, uint64_t block, hn::Vec<D> places,
                             hn::Vec<D>& lower, hn::Vec<D>& upper) {
  const hn::RepartitionToNarrow<D> d32;
  const auto multiplier0 = hn::Set(d32, kPhiloxMultiplier0);
  const auto multiplier1 = hn::Set(d32, kPhiloxMultiplier1);
  auto word0 = hn::Add(places, hn::Set(d, block));
  auto word1 = hn::ShiftRight<32>(word0);
  auto word2 = hn::Set(d, stream.step);
  auto word3 = hn::Set(d, stream.step >> 32);
  uint32_t key0 = stream.key0;
  uint32_t key1 = stream.key1;
  HWY_UNROLL(10)
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const auto product0 = hn::MulEven(hn::BitCast(d32, word0), multiplier0);
    const auto product1 = hn::MulEven(hn::BitCast(d32, word2), multiplier1);
    word0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product1), word1), hn::Set(d, key0));
    word1 = product1;
    word2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product0), word3), hn::Set(d, key1));
    word3 = product0;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  const auto lower_half = hn::Set(d, 0xffffffffu);
  const auto words01 = hn::Or(hn::And(word0, lower_half), hn::ShiftLeft<32>(word1));
  const auto words23 = hn::Or(hn::And(word2, lower_half), hn::ShiftLeft<32>(word3));
  lower = hn::InterleaveLower(d, words01, words23);
  upper = hn::InterleaveUpper(d, words01, words23);
}

void draw_words(const DrawStream& draws, uint64_t first, size_t n, uint32_t* words) {
  const DrawStream stream = draws;  // a copy, which stores through `words` can't change
  const hn::ScalableTag<uint64_t> d;
  const hn::RepartitionToNarrow<decltype(d)> d32;
  const size_t lanes = hn::Lanes(d);
  const auto places = philox_places(d);
  hn::Vec<decltype(d)> lower, upper;
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    philox_words(d, stream, (first + i) / 4, places, lower, upper);
    hn::StoreU(hn::BitCast(d32, lower), d32, words + i);
    hn::StoreU(hn::BitCast(d32, upper), d32, words + i + 2 * lanes);
  }
  for (; i < n; ++i) words[i] = stream.word(first + i);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace gradwire
HWY_AFTER_NAMESPACE();

#endif
#endif
