// Ternary quantization and packing, for one SIMD target. Contracts: stages/kernels.def.
//
// Each block has 320 values = 64 packed bytes. Comparisons give two bit arrays with one bit for
// each value: where b > h, and where b < -h. Five bits of each array make a byte of trits: 121 +
// weights(positive) - weights(negative).

#if defined(GRADWIRE_STAGES_TERNARY_TERNARY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADWIRE_STAGES_TERNARY_TERNARY_INL_H_
#undef GRADWIRE_STAGES_TERNARY_TERNARY_INL_H_
#else
#define GRADWIRE_STAGES_TERNARY_TERNARY_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"

#include "stages/element/load-inl.h"
#include "stages/element/residual_access-inl.h"
#include "stages/trits/trit.h"
#include "stages/trits/trit_bits.h"
#include "stages/trits/two_bits.h"
#include "stages/zero_run/zero_run.h"

HWY_BEFORE_NAMESPACE();
namespace gradwire::HWY_NAMESPACE {
namespace {

constexpr size_t kBlockBytes = 64;
constexpr size_t kBlockValues = kBlockBytes * kTritsPerByte;

// The bit arrays of a block in the order of the values, lowest bit first. 40 bytes of each are
// used; the others are room for whole vectors, and their content doesn't matter.
struct SignBits {
  alignas(64) uint8_t positive[64];
  alignas(64) uint8_t negative[64];
};

// weights(g) for the 16 values of the bits 0..3 of g; bit 4 adds 1.
alignas(16) constexpr uint8_t kWeights[16] = {0, 81, 27, 108, 9,  90, 36, 117,
                                              3, 84, 30, 111, 12, 93, 39, 120};

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL

// The 64 fives of bits, each in the low bits of a byte. The upper bits are undefined.
HWY_INLINE __m512i spread_bits(const uint8_t* bits) {
  // Five bytes to each 64-bit lane, then 8 unaligned bytes from each lane.
  alignas(64) static constexpr uint8_t kFives[64] = {
      0,  1, 2,  3,  4,  0,  0,  0,  5,  6, 7,  8,  9,  0,  0,  0,  10, 11, 12, 13, 14, 0,
      0,  0, 15, 16, 17, 18, 19, 0,  0,  0, 20, 21, 22, 23, 24, 0,  0,  0,  25, 26, 27, 28,
      29, 0, 0,  0,  30, 31, 32, 33, 34, 0, 0,  0,  35, 36, 37, 38, 39, 0,  0,  0};
  const __m512i fives =
      _mm512_permutexvar_epi8(_mm512_load_si512(kFives), _mm512_loadu_si512(bits));
  const __m512i offsets = _mm512_set1_epi64(0x231e19140f0a0500);  // 0, 5, ..., 35
  return _mm512_multishift_epi64_epi8(offsets, fives);
}

// weights(g) for all 32 g, twice, because vpermb takes six bits of an index.
struct WeightTable {
  alignas(64) uint8_t of[64] = {};
  constexpr WeightTable() {
    for (int g = 0; g < 64; ++g) of[g] = static_cast<uint8_t>(kWeights[g & 15] + (g >> 4 & 1));
  }
};
inline constexpr WeightTable kWeightTable;

using BlockTag = PackedTag;

// The 64 packed bytes of a block.
HWY_INLINE PackedVec packed_vector(const uint8_t* positive, const uint8_t* negative, size_t) {
  const __m512i table = _mm512_load_si512(kWeightTable.of);
  const __m512i plus = _mm512_permutexvar_epi8(spread_bits(positive), table);
  const __m512i minus = _mm512_permutexvar_epi8(spread_bits(negative), table);
  return PackedVec{_mm512_sub_epi8(_mm512_add_epi8(_mm512_set1_epi8(kZeroByte), plus), minus)};
}

#else

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
using BlockTag = hn::FixedTag<uint8_t, 32>;

// The bytes that hold 16 fives of bits, in each half of the vector.
HWY_INLINE hn::Vec<BlockTag> load_fives(BlockTag d8, const uint8_t* bits) {
  const hn::Half<BlockTag> half;
  return hn::Combine(d8, hn::LoadU(half, bits + 10), hn::LoadU(half, bits));
}
#else
using BlockTag = PackedTag;

HWY_INLINE hn::Vec<BlockTag> load_fives(BlockTag d8, const uint8_t* bits) {
  return hn::LoadU(d8, bits);
}
#endif

// weights() of the fives of bits that begin at byte `bits`.
HWY_INLINE hn::Vec<BlockTag> weights_of_bits(const uint8_t* bits) {
  const BlockTag d8;
  const hn::RepartitionToWide<BlockTag> d16;
  // Each 16-bit lane gets the two bytes that hold its two fives. These begin at bit 0, 2, 4 or 6; a
  // product moves them to bit 6.
  alignas(16) static constexpr uint8_t kPairs[16] = {0, 1, 1, 2, 2, 3, 3, 4,
                                                     5, 6, 6, 7, 7, 8, 8, 9};
  alignas(16) static constexpr uint16_t kMoves[8] = {64, 16, 4, 1, 64, 16, 4, 1};
  const auto pairs = hn::TableLookupBytes(load_fives(d8, bits), hn::LoadDup128(d8, kPairs));
  const auto moved = hn::Mul(hn::BitCast(d16, pairs), hn::LoadDup128(d16, kMoves));
  const auto lower = hn::And(hn::ShiftRight<6>(moved), hn::Set(d16, 0x001f));
  const auto upper = hn::And(hn::ShiftRight<3>(moved), hn::Set(d16, 0x1f00));
  const auto groups = hn::Or(lower, upper);
  const auto places0to3 = hn::BitCast(d8, hn::And(groups, hn::Set(d16, 0x0f0f)));
  const auto place4 = hn::And(hn::ShiftRight<4>(groups), hn::Set(d16, 0x0101));
  return hn::Add(hn::TableLookupBytes(hn::LoadDup128(d8, kWeights), places0to3),
                 hn::BitCast(d8, place4));
}

// One vector of a block's packed bytes, from byte i on.
HWY_INLINE hn::Vec<BlockTag> packed_vector(const uint8_t* positive, const uint8_t* negative,
                                           size_t i) {
  const auto plus = weights_of_bits(positive + i / 8 * 5);
  const auto minus = weights_of_bits(negative + i / 8 * 5);
  return hn::Sub(hn::Add(hn::Set(BlockTag(), kZeroByte), plus), minus);
}

#endif

// Both bit arrays are readable for 64 bytes, of which 40 are used.
HWY_INLINE void pack_block(const uint8_t* positive, const uint8_t* negative, uint8_t* packed) {
  for (size_t i = 0; i < kBlockBytes; i += hn::MaxLanes(BlockTag())) {
    hn::StoreU(packed_vector(positive, negative, i), BlockTag(), packed + i);
  }
}

HWY_INLINE void pack_sign_bits(const SignBits& bits, uint8_t* packed) {
  pack_block(bits.positive, bits.negative, packed);
}

// b minus the values of the masked trits.
template <class D>
HWY_INLINE hn::Vec<D> subtract_trits(D, hn::Vec<D> b, hn::Mask<D> above, hn::Mask<D> below,
                                     hn::Vec<D> m) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  const __m512 less = _mm512_mask_sub_ps(b.raw, above.raw, b.raw, m.raw);
  return hn::Vec<D>{_mm512_mask_add_ps(less, below.raw, less, m.raw)};
#else
  return hn::Sub(b, hn::Or(hn::IfThenElseZero(above, m), hn::IfThenElseZero(below, hn::Neg(m))));
#endif
}

// Compares 64 values and updates their residuals; writes 8 bytes of each bit array.
template <class Residual>
HWY_INLINE void quantize_64(const float* x, Residual residual, float m, uint8_t* positive,
                            uint8_t* negative) {
  const hn::CappedTag<float, 16> d;
  const size_t lanes = hn::Lanes(d);
  const auto high = hn::Set(d, m * 0.5f);
  const auto low = hn::Set(d, -(m * 0.5f));
  const auto step = hn::Set(d, m);
  hn::Mask<decltype(d)> above0, above1, below0, below1;
  const auto quantize = [&](size_t i, auto& above, auto& below) HWY_ATTR {
    const auto b = residual.add(d, hn::LoadU(d, x + i), i);
    above = hn::Gt(b, high);
    below = hn::Lt(b, low);
    return subtract_trits(d, b, above, below, step);
  };
  HWY_UNROLL(8)
  for (size_t i = 0; i < 64; i += 2 * lanes) {
    const auto left0 = quantize(i, above0, below0);
    const auto left1 = quantize(i + lanes, above1, below1);
    residual.set(d, left0, left1, i);
    if (lanes >= 8) {
      hn::StoreMaskBits(d, above0, positive + i / 8);
      hn::StoreMaskBits(d, above1, positive + (i + lanes) / 8);
      hn::StoreMaskBits(d, below0, negative + i / 8);
      hn::StoreMaskBits(d, below1, negative + (i + lanes) / 8);
    } else {
      positive[i / 8] =
          static_cast<uint8_t>(bits_of_mask(d, above0) | bits_of_mask(d, above1) << 4);
      negative[i / 8] =
          static_cast<uint8_t>(bits_of_mask(d, below0) | bits_of_mask(d, below1) << 4);
    }
  }
}

// The same for n values. The bits of absent values in the last 64 are not set.
template <class Residual>
HWY_INLINE void quantize_values(const float* x, Residual residual, size_t n, float m,
                                uint8_t* positive, uint8_t* negative) {
  const size_t whole = n / kWordBits * kWordBits;
  for (size_t i = 0; i < whole; i += kWordBits) {
    quantize_64(x + i, residual.from(i), m, positive + i / 8, negative + i / 8);
  }
  if (whole == n) return;
  on_padded_copy<kWordBits>(x + whole, residual.from(whole), n - whole,
                            [=](const float* copied_x, auto copied_r) HWY_ATTR {
                              quantize_64(copied_x, copied_r, m, positive + whole / 8,
                                          negative + whole / 8);
                            });
}

// Calls take(block, bits) for each block of 320 values, in order, but only when the next block has
// been compared: vectors loaded right after the small stores of the bits would wait for them.
template <class Residual, typename Take>
HWY_INLINE void ternary_blocks(const float* x, Residual residual, size_t blocks, float m,
                               Take take) {
  SignBits bits[2];
  for (size_t block = 0; block < blocks; ++block) {
    const size_t at = block * kBlockValues;
    SignBits& next = bits[block & 1];
    quantize_values(x + at, residual.from(at), kBlockValues, m, next.positive, next.negative);
    if (block != 0) take(block - 1, bits[~block & 1]);
  }
  if (blocks != 0) take(blocks - 1, bits[~blocks & 1]);
}

void pack_trits(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* packed) {
  const auto* positive = reinterpret_cast<const uint8_t*>(plus);
  const auto* negative = reinterpret_cast<const uint8_t*>(minus);
  const size_t size = trit_words(n) * sizeof(uint64_t);
  constexpr size_t kUsed = kBlockValues / 8;
  size_t at = 0;
  for (; at + sizeof(SignBits::positive) <= size; at += kUsed, packed += kBlockBytes) {
    pack_block(positive + at, negative + at, packed);
  }
  // The last blocks are packed from a padded copy.
  for (; at * 8 < n; at += kUsed, packed += kBlockBytes) {
    SignBits bits = {};
    std::memcpy(bits.positive, positive + at, HWY_MIN(kUsed, size - at));
    std::memcpy(bits.negative, negative + at, HWY_MIN(kUsed, size - at));
    uint8_t last[kBlockBytes];
    pack_sign_bits(bits, last);
    std::memcpy(packed, last, HWY_MIN(kBlockBytes, packed_size(n - at * 8)));
  }
}

// The packed bytes of a last, short block.
template <class Residual>
HWY_INLINE void ternary_last_block(const float* x, Residual residual, size_t n, float m,
                                   uint8_t* packed) {
  SignBits bits = {};
  quantize_values(x, residual, n, m, bits.positive, bits.negative);
  pack_sign_bits(bits, packed);
}

// Groups of values are measured and then packed, chunk by chunk. While a chunk is packed, which
// reads from cache, the next one comes from memory.
constexpr size_t kNextChunk = kMaxRunInput * kTritsPerByte;

void ternary_pack(const float* x, ResidualValues r, size_t n, float m, uint8_t* packed) {
  with_residual(r, [=](auto residual) HWY_ATTR {
    const size_t blocks = n / kBlockValues;
    const size_t done = blocks * kBlockValues;
    ternary_blocks(x, residual, blocks, m, [=](size_t block, const SignBits& bits) HWY_ATTR {
      const size_t at = block * kBlockValues;
      fetch_values(x + at, kNextChunk, kBlockValues);
      residual.from(at).fetch_values(kNextChunk, kBlockValues);
      pack_sign_bits(bits, packed + block * kBlockBytes);
    });
    if (done == n) return;
    uint8_t last[kBlockBytes];
    ternary_last_block(x + done, residual.from(done), n - done, m, last);
    std::memcpy(packed + blocks * kBlockBytes, last, packed_size(n - done));
  });
}

void trit_bits(const float* x, ResidualValues r, size_t n, float m, uint64_t* plus,
               uint64_t* minus) {
  with_residual(r, [=](auto residual) HWY_ATTR {
    quantize_values(x, residual, n, m, reinterpret_cast<uint8_t*>(plus),
                    reinterpret_cast<uint8_t*>(minus));
  });
}

}  // namespace
}  // namespace gradwire::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
