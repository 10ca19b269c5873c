// Random words, for one SIMD target. Contracts: stages/kernels.def.

#include <cstring>

#include "hwy/highway.h"

#include "base/philox.h"
#include "stages/element/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

// The distance of each lane's block from the first block, so that philox_words gives the words in
// order.
template <class D>
HWY_INLINE hn::Vec<D> philox_places(D d) {
  const auto lane = hn::Iota(d, 0);
  const auto odd = hn::Ne(hn::And(lane, hn::Set(d, 1)), hn::Zero(d));
  return hn::Add(hn::ShiftRight<1>(lane), hn::IfThenElseZero(odd, hn::Set(d, hn::Lanes(d) / 2)));
}

// Each 64-bit lane holds a word of one block in its lower half. The upper half does not matter,
// because the multiplication reads the lower half alone.
template <class D>
HWY_INLINE void philox_round(D d, uint32_t key0, uint32_t key1, hn::Vec<D>& word0,
                             hn::Vec<D>& word1, hn::Vec<D>& word2, hn::Vec<D>& word3) {
  const hn::RepartitionToNarrow<D> d32;
  const auto product0 = hn::MulEven(hn::BitCast(d32, word0), hn::Set(d32, kPhiloxMultiplier0));
  const auto product1 = hn::MulEven(hn::BitCast(d32, word2), hn::Set(d32, kPhiloxMultiplier1));
  word0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product1), word1), hn::Set(d, key0));
  word1 = product1;
  word2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product0), word3), hn::Set(d, key1));
  word3 = product0;
}

// Two words of the last round in each 64-bit lane: below, the product's upper half, mixed with the
// word of the previous round and the key; above, the product's lower half.
template <class D>
HWY_INLINE hn::Vec<D> philox_last_words(D d, hn::Vec<D> product, hn::Vec<D> word, uint32_t key) {
  const hn::RepartitionToNarrow<D> d32;
  const auto swapped = hn::Shuffle2301(hn::BitCast(d32, product));
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if constexpr (hn::MaxLanes(d) == 8) {
    return hn::Vec<D>{
        _mm512_mask_ternarylogic_epi32(swapped.raw, 0x5555, word.raw, hn::Set(d, key).raw, 0x96)};
  }
#endif
  const auto mixed = hn::Xor(hn::Xor(swapped, hn::BitCast(d32, word)), hn::Set(d32, key));
  return hn::BitCast(d, hn::OddEven(swapped, mixed));
}

// The counters of the blocks from `block` on.
template <class D>
HWY_INLINE void philox_counters(D d, uint64_t step, uint64_t block, hn::Vec<D> places,
                                hn::Vec<D>& word0, hn::Vec<D>& word1, hn::Vec<D>& word2,
                                hn::Vec<D>& word3) {
  word0 = hn::Add(places, hn::Set(d, block));
  word1 = hn::ShiftRight<32>(word0);
  word2 = hn::Set(d, step);
  word3 = hn::Set(d, step >> 32);
}

// Computes the last round and stores its words in order.
template <class D>
HWY_INLINE void store_words(D d, uint32_t key0, uint32_t key1, hn::Vec<D> word0, hn::Vec<D> word1,
                            hn::Vec<D> word2, hn::Vec<D> word3, uint32_t* words) {
  const hn::RepartitionToNarrow<D> d32;
  const auto product0 = hn::MulEven(hn::BitCast(d32, word0), hn::Set(d32, kPhiloxMultiplier0));
  const auto product1 = hn::MulEven(hn::BitCast(d32, word2), hn::Set(d32, kPhiloxMultiplier1));
  const auto words01 = philox_last_words(d, product1, word1, key0);
  const auto words23 = philox_last_words(d, product0, word3, key1);
  const auto upper = hn::InterleaveUpper(d, words01, words23);
  hn::StoreU(hn::BitCast(d32, hn::InterleaveLower(d, words01, words23)), d32, words);
  hn::StoreU(hn::BitCast(d32, upper), d32, words + hn::Lanes(d32));
}

// Chains of rounds that are computed side by side, because one chain alone mostly waits for its
// multiplications. 16 registers have no room for four chains.
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3
constexpr size_t kPhiloxChains = 2;
#else
constexpr size_t kPhiloxChains = 4;
#endif

// kChains times 4 words for each lane, from element 4 * block on.
template <size_t kChains, class D>
HWY_INLINE void philox_words(D d, DrawStream draw_stream, uint64_t block, hn::Vec<D> places,
                             uint32_t* words) {
  const uint64_t blocks = hn::Lanes(d);
  uint32_t key0 = draw_stream.key0;
  uint32_t key1 = draw_stream.key1;
  hn::Vec<D> a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, e0, e1, e2, e3;
  philox_counters(d, draw_stream.step, block, places, a0, a1, a2, a3);
  philox_counters(d, draw_stream.step, block + blocks, places, b0, b1, b2, b3);
  philox_counters(d, draw_stream.step, block + 2 * blocks, places, c0, c1, c2, c3);
  philox_counters(d, draw_stream.step, block + 3 * blocks, places, e0, e1, e2, e3);
  HWY_UNROLL(9)
  for (int round = 1; round < kPhiloxRounds; ++round) {
    philox_round(d, key0, key1, a0, a1, a2, a3);
    if constexpr (kChains > 1) philox_round(d, key0, key1, b0, b1, b2, b3);
    if constexpr (kChains > 2) philox_round(d, key0, key1, c0, c1, c2, c3);
    if constexpr (kChains > 3) philox_round(d, key0, key1, e0, e1, e2, e3);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  store_words(d, key0, key1, a0, a1, a2, a3, words);
  if constexpr (kChains > 1) store_words(d, key0, key1, b0, b1, b2, b3, words + 4 * blocks);
  if constexpr (kChains > 2) store_words(d, key0, key1, c0, c1, c2, c3, words + 8 * blocks);
  if constexpr (kChains > 3) store_words(d, key0, key1, e0, e1, e2, e3, words + 12 * blocks);
}

void draw_words(const DrawStream& draws, uint64_t first, size_t n, uint32_t* words) {
  const DrawStream draw_stream = draws;  // a copy, which stores through `words` can't change
  const hn::ScalableTag<uint64_t> d;
  const size_t step = 4 * hn::Lanes(d);
  const auto places = philox_places(d);
  size_t i = 0;
  for (; i + kPhiloxChains * step <= n; i += kPhiloxChains * step) {
    philox_words<kPhiloxChains>(d, draw_stream, (first + i) / 4, places, words + i);
  }
  for (; i < n; i += step) {
    uint32_t last[4 * hn::MaxLanes(d)];
    philox_words<1>(d, draw_stream, (first + i) / 4, places, last);
    std::memcpy(words + i, last, HWY_MIN(step, n - i) * sizeof *words);
  }
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
