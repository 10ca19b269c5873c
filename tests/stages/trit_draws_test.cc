#include "stages/ternary/trit_draws.h"

#include "stages/trits/two_bits.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

class TritDraws : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(TritDraws);

TEST(TritDraw, GoldenTrits) {
  const TritDraw draw = TritDraw::create(FLT_MAX, 1.0f);
  const uint32_t half = 0x80000000u;  // u = 1/2
  EXPECT_EQ(draw_trit(0.5f, draw, half), 0);
  EXPECT_EQ(draw_trit(0.50000006f, draw, half), 1);
  EXPECT_EQ(draw_trit(-0.50000006f, draw, half), -1);
  EXPECT_EQ(draw_trit(0.50000006f, draw, half + 0x100), 0);
  EXPECT_EQ(draw_trit(0.5f, draw, half - 1), 1) << "the lower 8 bits of u don't count";
  EXPECT_EQ(draw_trit(1e-30f, draw, 0xff), 1) << "u = 0";
  EXPECT_EQ(draw_trit(0.0f, draw, 0), 0);
  EXPECT_EQ(draw_trit(-0.0f, draw, 0), 0);
  EXPECT_EQ(draw_trit(0.9f, TritDraw::create(0.5f, 1.0f), half), 0) << "clipped to 0.5";
  EXPECT_EQ(draw_trit(-0.9f, TritDraw::create(0.5f, 1.0f), half - 0x100), -1);
}

TEST(TritDraw, TheLargestValueIsAlwaysSent) {
  for (float scale : {1.0f, 1.0000001f, 1.5f, 1.9999999f, 3e-30f, FLT_MAX, 0x1p-102f}) {
    EXPECT_EQ(draw_trit(scale, TritDraw::create(FLT_MAX, scale), 0xffffffffu), 1) << scale;
    EXPECT_EQ(draw_trit(-2 * scale, TritDraw::create(scale, scale), 0xffffffffu), -1) << scale;
  }
}

std::vector<uint32_t> any_words(size_t n, uint32_t seed) {
  std::vector<uint32_t> words(n);
  std::mt19937 random(seed);
  for (uint32_t& word : words) word = static_cast<uint32_t>(random());
  if (n > 6) words[5] = 0, words[6] = 0xffffffffu;
  return words;
}

TEST_P(TritDraws, AreTheDefinitionInTheirSpans) {
  Guarded<float> x(41000);
  Guarded<uint64_t> plus(700);
  Guarded<uint64_t> minus(700);
  Guarded<uint32_t> words(41000);
  // The scale is above, at and below the limit.
  for (const TritDraw draw : {TritDraw::create(1e-3f, 2e-3f), TritDraw::create(1e-3f, 1e-3f),
                              TritDraw::create(FLT_MAX, 2e-3f)}) {
    for (size_t n : lengths()) {
      const Edge edge = kEdges[n % 2];
      const std::vector<uint32_t> drawn = any_words(n, static_cast<uint32_t>(n));
      auto values = gradient_like(n, static_cast<uint32_t>(n));
      if (n > 3) values[3] = -0.0f;
      std::vector<uint64_t> want_plus(trit_words(n)), want_minus(trit_words(n));
      for (size_t i = 0; i < n; ++i) {
        const int trit = draw_trit(values[i], draw, drawn[i]);
        if (trit > 0) want_plus[i / 64] |= uint64_t{1} << i % 64;
        if (trit < 0) want_minus[i / 64] |= uint64_t{1} << i % 64;
      }
      kernels().draw_trits(x.take_copy(values, edge), n, draw, words.take_copy(drawn, edge),
                           plus.take(trit_words(n), edge), minus.take(trit_words(n), edge));
      ASSERT_EQ(plus.copy(), want_plus) << n;
      ASSERT_EQ(minus.copy(), want_minus) << n;
      ASSERT_TRUE(plus.outside_untouched() && minus.outside_untouched()) << n;
    }
  }
}

std::vector<int> any_trits(size_t n, uint32_t seed) {
  std::vector<int> trits;
  for (uint8_t byte : any_bytes(n, 0, 2, seed)) trits.push_back(byte - 1);
  return trits;
}

struct Bits {
  std::vector<uint64_t> plus, minus;
  explicit Bits(const std::vector<int>& trits)
      : plus(trit_words(trits.size())), minus(trit_words(trits.size())) {
    for (size_t i = 0; i < trits.size(); ++i) {
      if (trits[i] > 0) plus[i / 64] |= uint64_t{1} << i % 64;
      if (trits[i] < 0) minus[i / 64] |= uint64_t{1} << i % 64;
    }
  }
};

TEST_P(TritDraws, FiveTritsMakeAByte) {
  Guarded<uint64_t> plus(700);
  Guarded<uint64_t> minus(700);
  Guarded<uint8_t> packed(9000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const std::vector<int> trits = any_trits(n, static_cast<uint32_t>(n));
    const Bits bits(trits);
    std::vector<uint8_t> want(packed_size(n), kZeroByte);
    for (size_t i = 0; i < n; ++i) {
      want[i / 5] =
          static_cast<uint8_t>(want[i / 5] + trits[i] * trit_weight(static_cast<int>(i % 5)));
    }
    kernels().pack_trits(plus.take_copy(bits.plus, edge), minus.take_copy(bits.minus, edge), n,
                         packed.take(packed_size(n), edge));
    ASSERT_EQ(packed.copy(), want) << n;
    ASSERT_TRUE(packed.outside_untouched()) << n;
  }
}

TEST_P(TritDraws, FourTritsMakeAByteAndComeBack) {
  Guarded<uint64_t> plus(700);
  Guarded<uint64_t> minus(700);
  Guarded<uint8_t> packed(11000);
  Guarded<float> out(41000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const std::vector<int> trits = any_trits(n, static_cast<uint32_t>(n));
    const Bits bits(trits);
    kernels().pack_two_bits(plus.take_copy(bits.plus, edge), minus.take_copy(bits.minus, edge), n,
                            packed.take(two_bit_size(n), edge));
    const std::vector<uint8_t> bytes = packed.copy();
    ASSERT_TRUE(packed.outside_untouched()) << n;
    for (size_t i = 0; i < 4 * bytes.size(); ++i) {
      const int code = i >= n || trits[i] == 0 ? 0 : trits[i] > 0 ? 1 : 2;
      ASSERT_EQ(bytes[i / 4] >> 2 * (i % 4) & 3, code) << n << " " << i;
    }
    std::vector<float> want(n), sums = gradient_like(n, 5);
    if (n > 5) sums[5] = -0.0f;
    for (size_t i = 0; i < n; ++i) want[i] = ternary_value(trits[i], 0.1f);
    ASSERT_TRUE(kernels().unpack_two_bits(packed.take_copy(bytes, edge), n, 0.1f, out.take(n, edge),
                                          kStore));
    ASSERT_SAME_BITS(out.copy(), want) << n;
    ASSERT_TRUE(out.outside_untouched()) << n;
    for (size_t i = 0; i < n; ++i) want[i] = ternary_accumulate(sums[i], trits[i], 0.1f);
    ASSERT_TRUE(kernels().unpack_two_bits(packed.take_copy(bytes, edge), n, 0.1f,
                                          out.take_copy(sums, edge), kAdd));
    ASSERT_SAME_BITS(out.copy(), want) << n;
    ASSERT_TRUE(out.outside_untouched()) << n;
  }
}

TEST_P(TritDraws, CodeThreeAndPaddingAreRefused) {
  for (size_t n = 1; n < 150; ++n) {
    std::vector<uint8_t> packed(two_bit_size(n), 0);
    std::vector<float> out(n);
    EXPECT_TRUE(kernels().unpack_two_bits(packed.data(), n, 1.0f, out.data(), kStore));
    for (size_t i = 0; i < 4 * packed.size(); ++i) {
      for (int code = 1; code <= 3; ++code) {
        packed[i / 4] = static_cast<uint8_t>(code << 2 * (i % 4));
        const bool valid = i < n && code != 3;
        ASSERT_EQ(kernels().unpack_two_bits(packed.data(), n, 1.0f, out.data(), kStore), valid)
            << n;
        ASSERT_EQ(kernels().unpack_two_bits(packed.data(), n, 1.0f, out.data(), kAdd), valid) << n;
      }
      packed[i / 4] = 0;
    }
  }
}

}  // namespace
}  // namespace gradwire
