#include "stages/levels/levels.h"

#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

using limits = std::numeric_limits<float>;

const std::vector<int32_t> kLargest = {1, 2, 3, 4, 5, 7, 11, 15, 31, 63, 64, 100, 127};
const std::vector<int32_t> kLargestWide = {128, 129, 255, 256, 511, 1000, 2047, 4095, 4096, 8191};

std::vector<int32_t> all_largest() {
  std::vector<int32_t> all = kLargest;
  all.insert(all.end(), kLargestWide.begin(), kLargestWide.end());
  return all;
}

// Largest magnitudes from the smallest to the largest float.
const std::vector<float> kNorms = {limits::denorm_min(),
                                   3 * limits::denorm_min(),
                                   1e-41f,
                                   FLT_MIN,
                                   1e-20f,
                                   0x1p-57f,
                                   0x1.fffffep-58f,
                                   0.1f,
                                   1.0f,
                                   3.0f,
                                   1e20f,
                                   FLT_MAX / 2,
                                   FLT_MAX};

TEST(LevelUnit, IsTheSmallestThatReachesTheNorm) {
  for (int32_t s : all_largest()) {
    for (float norm : kNorms) {
      const float unit = level_unit(norm, s);
      const double reached = static_cast<double>(unit) * s;
      ASSERT_TRUE(std::isfinite(unit * static_cast<float>(s))) << norm << " " << s;
      const double below = static_cast<double>(std::nextafter(unit, 0.0f)) * s;
      ASSERT_LT(below, norm) << norm << " " << s;
      if (reached >= norm) continue;
      // The unit may be too small only if the next float would overflow.
      ASSERT_EQ(norm, FLT_MAX) << s;
      ASSERT_TRUE(std::isinf(std::nextafter(unit, limits::infinity()) * static_cast<float>(s)));
    }
    EXPECT_EQ(level_unit(0.0f, s), 0.0f);
  }
  EXPECT_EQ(level_unit(3.0f, 3), 1.0f);
  EXPECT_EQ(level_unit(1.0f, 3), std::nextafter(0x1.555554p-2f, 1.0f));  // 1/3, rounded up
}

TEST(Level, IsTheFloorOfTheSum) {
  const LevelScale scale = level_scale(0.5f, 3);
  const uint32_t half = 1u << 31;
  EXPECT_EQ(level_of(0.0f, scale, ~0u), 0);
  EXPECT_EQ(level_of(-0.0f, scale, ~0u), 0);
  EXPECT_EQ(level_of(0.25f, scale, half), 1);
  EXPECT_EQ(level_of(0.25f, scale, half - 1), 0);
  EXPECT_EQ(level_of(-0.25f, scale, half), 0);
  EXPECT_EQ(level_of(-0.25f, scale, half - 1), -1);
  EXPECT_EQ(level_of(0.5f, scale, 0), 1);
  EXPECT_EQ(level_of(-0.5f, scale, ~0u), -1);
  EXPECT_EQ(level_of(1.5f, scale, ~0u), 3);
  EXPECT_EQ(level_of(-1.5f, scale, 0), -3);
  EXPECT_EQ(level_of(1.375f, scale, 0x3fffffff), 2);
  EXPECT_EQ(level_of(1.375f, scale, 0x40000000), 3);
}

TEST(Level, FillsThirtyOneBitsWithItsFraction) {
  for (int32_t s : all_largest()) {
    EXPECT_EQ(level_fraction(s), s <= 127 ? 24 : 32 - level_width(s));
    EXPECT_LT((int64_t{s} + 1) << level_fraction(s), (int64_t{1} << 31) + 1) << s;
  }
  EXPECT_EQ(level_fraction(128), 23);
  EXPECT_EQ(level_fraction(8191), 18);
}

TEST(Level, OfTheNormIsTheLargest) {
  for (int32_t s : all_largest()) {
    for (float norm : kNorms) {
      const LevelScale scale = level_scale(level_unit(norm, s), s);
      for (uint32_t word : {0u, 1u << 31, ~0u}) {
        ASSERT_LE(level_of(norm, scale, word), s);
        ASSERT_GE(level_of(-norm, scale, word), -s);
      }
      // The level may be below s by the effect of rounding; denormal units are larger than needed.
      if (norm < 1e-35f) continue;
      ASSERT_EQ(level_of(norm, scale, 0xfff00000u), s) << norm << " " << s;
      ASSERT_EQ(level_of(-norm, scale, 0x000fffffu), -s) << norm << " " << s;
    }
  }
}

class Levels : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(Levels);

std::vector<int8_t> levels_like(size_t n, int32_t s, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int8_t> levels(n);
  for (int8_t& level : levels) {
    level = static_cast<int8_t>(static_cast<int32_t>(random() % (2u * s + 1)) - s);
  }
  return levels;
}

TEST_P(Levels, QuantizingAgreesWithTheScalarTable) {
  Guarded<float> x(41000);
  Guarded<int8_t> levels(41000);
  Guarded<uint32_t> words(41000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const int32_t s = kLargest[n % kLargest.size()];
    const float norm = kNorms[n % kNorms.size()];
    std::vector<float> values = gradient_like(n, static_cast<uint32_t>(n));
    float largest = limits::denorm_min();
    for (float value : values) largest = std::max(largest, std::fabs(value));
    for (float& value : values) value = value / largest * norm;
    if (n > 2) values[0] = norm, values[1] = -norm, values[2] = -0.0f;
    const LevelScale scale = level_scale(level_unit(norm, s), s);
    std::vector<uint32_t> drawn(n);
    scalar().draw_words(DrawStream::create(5, 6, n), 0, n, drawn.data());
    std::vector<int8_t> want(n);
    scalar().quantize_levels(values.data(), n, scale, drawn.data(), want.data());
    kernels().quantize_levels(x.take_copy(values, edge), n, scale, words.take_copy(drawn, edge),
                              levels.take(n, edge));
    ASSERT_EQ(levels.copy(), want) << n << " s=" << s << " norm " << norm;
    ASSERT_TRUE(levels.outside_untouched()) << n;
  }
}

TEST_P(Levels, WideOnesAgreeWithTheScalarTable) {
  Guarded<float> x(41000);
  Guarded<int16_t> levels(41000);
  Guarded<uint32_t> words(41000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const int32_t s = kLargestWide[n % kLargestWide.size()];
    const float norm = kNorms[n % kNorms.size()];
    std::vector<float> values = gradient_like(n, static_cast<uint32_t>(n));
    float largest = limits::denorm_min();
    for (float value : values) largest = std::max(largest, std::fabs(value));
    for (float& value : values) value = value / largest * norm;
    if (n > 2) values[0] = norm, values[1] = -norm, values[2] = -0.0f;
    const float unit = level_unit(norm, s);
    const LevelScale scale = level_scale(unit, s);
    std::vector<uint32_t> drawn(n);
    scalar().draw_words(DrawStream::create(5, 6, n), 0, n, drawn.data());
    std::vector<int16_t> want(n);
    scalar().quantize_wide_levels(values.data(), n, scale, drawn.data(), want.data());
    for (size_t i = 0; i < n; ++i) ASSERT_LE(std::abs(want[i]), s) << n << " " << i;
    kernels().quantize_wide_levels(x.take_copy(values, edge), n, scale,
                                   words.take_copy(drawn, edge), levels.take(n, edge));
    ASSERT_EQ(levels.copy(), want) << n << " s=" << s << " norm " << norm;
    ASSERT_TRUE(levels.outside_untouched()) << n;

    const auto sums = gradient_like(n, 3);
    std::vector<float> stored(n), added(n);
    for (size_t i = 0; i < n; ++i) {
      stored[i] = static_cast<float>(want[i]) * unit;
      added[i] = sums[i] + stored[i];
    }
    kernels().scale_wide_levels(levels.take_copy(want, edge), n, unit, x.take(n, edge), kStore);
    ASSERT_SAME_BITS(x.copy(), stored) << n;
    kernels().scale_wide_levels(levels.take_copy(want, edge), n, unit, x.take_copy(sums, edge),
                                kAdd);
    ASSERT_SAME_BITS(x.copy(), added) << n;
    ASSERT_TRUE(x.outside_untouched()) << n;
  }
}

// A thread may change x after its norm was taken.
TEST_P(Levels, OfValuesBeyondTheNormStayWithinS) {
  const size_t n = 1000;
  const float beyond[] = {limits::quiet_NaN(),
                          limits::infinity(),
                          -limits::infinity(),
                          FLT_MAX,
                          -FLT_MAX,
                          1.01f,
                          -1.01f,
                          130.0f,
                          -130.0f,
                          300.0f,
                          -300.0f,
                          70000.0f};
  Guarded<float> x(n);
  Guarded<uint32_t> words(n);
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = beyond[i % std::size(beyond)];
  std::vector<uint32_t> drawn(n);
  scalar().draw_words(DrawStream::create(5, 6, 7), 0, n, drawn.data());
  for (int32_t s : kLargest) {
    const LevelScale scale = level_scale(level_unit(1.0f, s), s);
    Guarded<int8_t> levels(n);
    kernels().quantize_levels(x.take_copy(values, Edge::kEnd), n, scale,
                              words.take_copy(drawn, Edge::kEnd), levels.take(n, Edge::kEnd));
    for (int8_t level : levels.copy()) ASSERT_LE(std::abs(level), s);
  }
  for (int32_t s : kLargestWide) {
    const LevelScale scale = level_scale(level_unit(1.0f, s), s);
    Guarded<int16_t> levels(n);
    kernels().quantize_wide_levels(x.take_copy(values, Edge::kEnd), n, scale,
                                   words.take_copy(drawn, Edge::kEnd), levels.take(n, Edge::kEnd));
    for (int16_t level : levels.copy()) ASSERT_LE(std::abs(level), s);
  }
}

TEST_P(Levels, BecomeValues) {
  Guarded<int8_t> levels(41000);
  Guarded<float> out(41000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const auto given = levels_like(n, 127, static_cast<uint32_t>(n));
    const auto sums = gradient_like(n, 3);
    const float unit = kNorms[n % kNorms.size()] / 128;
    std::vector<float> values(n), added(n);
    for (size_t i = 0; i < n; ++i) {
      values[i] = static_cast<float>(given[i]) * unit;
      added[i] = sums[i] + values[i];
    }
    kernels().scale_levels(levels.take_copy(given, edge), n, unit, out.take(n, edge), kStore);
    ASSERT_SAME_BITS(out.copy(), values) << n;
    ASSERT_TRUE(out.outside_untouched()) << n;
    kernels().scale_levels(levels.take_copy(given, edge), n, unit, out.take_copy(sums, edge), kAdd);
    ASSERT_SAME_BITS(out.copy(), added) << n;
    ASSERT_TRUE(out.outside_untouched()) << n;
  }
}

TEST_P(Levels, GoldenPacking) {
  const auto expect = [&](const std::vector<int8_t>& levels, int32_t s,
                          const std::vector<uint8_t>& bytes) {
    std::vector<uint8_t> packed(packed_levels_size(levels.size(), level_width(s)));
    kernels().pack_levels(levels.data(), levels.size(), s, packed.data());
    EXPECT_EQ(packed, bytes) << s;
  };
  expect({-1, 0, 1, 0, 1}, 1, {0x64, 0x02});        // 00 01 10 01, 10
  expect({3, -3, 1}, 3, {0x06, 0x01});              // 110 000 100
  expect({-7, 7, 0}, 7, {0xe0, 0x07});              // 0 14, 7
  expect({127, -127, 0}, 127, {0xfe, 0x00, 0x7f});  // 254, 0, 127
  expect({5, -5, 5}, 5, {0x0a, 0x0a});              // 10 0, 10
}

TEST_P(Levels, PackingAgreesWithTheScalarTableAndUnpackingUndoesIt) {
  Guarded<int8_t> levels(41000);
  Guarded<uint8_t> packed(41000);
  for (int32_t s : kLargest) {
    const int width = level_width(s);
    for (size_t n : lengths()) {
      if (n > 300 && n < 4000 && n % 7 != 0) continue;
      const Edge edge = kEdges[n % 2];
      const auto given = levels_like(n, s, static_cast<uint32_t>(n));
      const size_t size = packed_levels_size(n, width);
      std::vector<uint8_t> want(size);
      scalar().pack_levels(given.data(), n, s, want.data());
      kernels().pack_levels(levels.take_copy(given, edge), n, s, packed.take(size, edge));
      ASSERT_EQ(packed.copy(), want) << n << " s=" << s;
      ASSERT_TRUE(packed.outside_untouched()) << n;
      ASSERT_TRUE(
          kernels().unpack_levels(packed.take_copy(want, edge), n, s, levels.take(n, edge)));
      ASSERT_EQ(levels.copy(), given) << n << " s=" << s;
      ASSERT_TRUE(levels.outside_untouched()) << n;
    }
  }
}

TEST_P(Levels, UnpackingRefusesLevelsAboveTheLargestAndPadding) {
  for (int32_t s : kLargest) {
    const int width = level_width(s);
    for (size_t n : {1u, 5u, 8u, 16u, 63u, 64u, 200u}) {
      std::vector<int8_t> levels(n);
      std::vector<uint8_t> packed(packed_levels_size(n, width));
      scalar().pack_levels(levels.data(), n, s, packed.data());
      for (size_t bit = n * static_cast<size_t>(width); bit < packed.size() * 8; ++bit) {
        auto padded = packed;
        padded[bit / 8] |= static_cast<uint8_t>(1u << bit % 8);
        ASSERT_FALSE(kernels().unpack_levels(padded.data(), n, s, levels.data())) << n;
      }
      // All bits of a level are set: 2^width - 1 is above 2 s.
      for (size_t i = 0; i < n; ++i) {
        auto above = packed;
        for (int place = 0; place < width; ++place) {
          const size_t bit = i * static_cast<size_t>(width) + static_cast<size_t>(place);
          above[bit / 8] |= static_cast<uint8_t>(1u << bit % 8);
        }
        ASSERT_FALSE(kernels().unpack_levels(above.data(), n, s, levels.data())) << n << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace gradwire
