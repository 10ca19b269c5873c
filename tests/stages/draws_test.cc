#include <algorithm>
#include <array>
#include <set>

#include "base/philox.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

// The vectors that Random123 publishes for philox4x32, 10 rounds (kat_vectors).
TEST(Philox, KnownAnswers) {
  const auto expect = [](PhiloxBlock counter, uint32_t key0, uint32_t key1, PhiloxBlock want) {
    const PhiloxBlock got = philox(counter, key0, key1);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], want.word[i]) << i;
  };
  const uint32_t ones = 0xffffffffu;
  expect({{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}});
  expect({{ones, ones, ones, ones}}, ones, ones,
         {{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}});
  expect({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u, 0x299f31d0u,
         {{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}});
}

TEST(Philox, AStreamIsABlockForFourElements) {
  const DrawStream stream = DrawStream::create(0x0123456789abcdefu, 0xfedcba9876543210u, 77);
  const PhiloxBlock key = philox({{0x76543210u, 0xfedcba98u, 0, 0}}, 0x89abcdefu, 0x01234567u);
  const uint64_t element = (uint64_t{5} << 34) + 14;
  const PhiloxBlock block = philox({{3, 5, 77, 0}}, key.word[0], key.word[1]);
  EXPECT_EQ(stream.word(element), block.word[2]);
}

class Draws : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(Draws);

TEST_P(Draws, AreThoseOfTheStream) {
  Guarded<uint32_t> words(41000);
  for (uint64_t first : {uint64_t{0}, uint64_t{40960}, (uint64_t{1} << 34) - 64}) {
    for (size_t n : lengths()) {
      const DrawStream stream = DrawStream::create(n, 3, uint64_t{1} << 33);
      const Edge edge = kEdges[n % 2];
      kernels().draw_words(stream, first, n, words.take(n, edge));
      const std::vector<uint32_t> got = words.copy();
      for (size_t i = 0; i < n; i += 1 + n / 512) {
        ASSERT_EQ(got[i], stream.word(first + i)) << first << " " << n << " " << i;
      }
      ASSERT_TRUE(words.outside_untouched()) << n;
    }
  }
}

// Chi-square of pairs of 4-bit digits: 255 degrees of freedom, 99.9999 % of them below 388.
double chi_square_of_pairs(const DrawStream& a, const DrawStream& b, int shift) {
  constexpr size_t kDraws = 1 << 16;
  std::array<double, 256> counts{};
  std::vector<uint32_t> of_a(kDraws), of_b(kDraws);
  const Kernels& kernels = *available_kernels().front();
  kernels.draw_words(a, 0, kDraws, of_a.data());
  kernels.draw_words(b, 0, kDraws, of_b.data());
  for (size_t i = 0; i < kDraws; ++i) {
    ++counts[(of_a[i] >> shift & 15) * 16 + (of_b[i] >> shift & 15)];
  }
  double sum = 0;
  for (double count : counts) {
    const double expected = double{kDraws} / 256;
    sum += (count - expected) * (count - expected) / expected;
  }
  return sum;
}

TEST(Philox, RanksTensorsAndStepsAreIndependent) {
  const DrawStream stream = DrawStream::create(1, 2, 3);
  const DrawStream others[] = {
      DrawStream::create(1, 3, 3),                       // another tensor or rank
      DrawStream::create(1, 2, 4),                       // another step
      DrawStream::create(2, 2, 3),                       // another seed
      DrawStream::create(1, 2 + (uint64_t{1} << 32), 3)  // the upper halves count
  };
  for (const DrawStream& other : others) {
    for (int shift : {0, 14, 28}) EXPECT_LT(chi_square_of_pairs(stream, other, shift), 388.0);
  }
  EXPECT_GT(chi_square_of_pairs(stream, stream, 0), 388.0) << "the test can tell";
}

}  // namespace
}  // namespace gradwire
