#include "stages/int8/int8_rounding.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

class Int8 : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(Int8);

TEST_P(Int8, GoldenLevels) {
  const struct {
    float b;
    float unit;
    int8_t q;
  } kGolden[] = {
      {0.0f, 1.0f, 0},       {-0.0f, 1.0f, 0},    {1.0f, 1.0f, 1},      {-1.0f, 1.0f, -1},
      {0.5f, 1.0f, 0},       {1.5f, 1.0f, 2},     {2.5f, 1.0f, 2},      {-2.5f, 1.0f, -2},
      {-3.5f, 1.0f, -4},     {126.5f, 1.0f, 126}, {127.0f, 1.0f, 127},  {127.6f, 1.0f, 127},
      {-127.6f, 1.0f, -127}, {190.0f, 1.0f, 127}, {1e30f, 1.0f, 127},   {-1e30f, 1e-9f, -127},
      {1.0f, 0.0f, 0},       {0.0f, 0.0f, 0},     {0x1p-149f, 0.0f, 0}, {FLT_MAX, 0x1p121f, 127},
      {3e-45f, 1e-45f, 2},   {0.3f, 0.1f, 3},     {0x1p-140f, 1.0f, 0}, {-FLT_MAX, 1.0f, -127},
  };
  for (const auto& [b, unit, q] : kGolden) {
    const std::vector<float> x(67, b);
    std::vector<int8_t> out(67, 99);
    kernels().quantize_int8(x.data(), {}, 67, unit, out.data());
    EXPECT_EQ(out, std::vector<int8_t>(67, q)) << b << " " << unit;
  }
}

TEST_P(Int8, EveryLevelComesBack) {
  std::vector<int8_t> q(255);
  for (int i = 0; i < 255; ++i) q[static_cast<size_t>(i)] = static_cast<int8_t>(i - 127);
  for (float unit : {1.0f, 0.1f, 1e-38f, 1e-45f, float_of(kLargestInt8UnitBits)}) {
    std::vector<float> values(255);
    ASSERT_TRUE(kernels().dequantize_int8(q.data(), 255, unit, values.data(), kStore));
    for (size_t i = 0; i < 255; ++i) {
      EXPECT_EQ(bits_of(values[i]), bits_of(static_cast<float>(q[i]) * unit)) << unit;
    }
    std::vector<int8_t> back(255);
    kernels().quantize_int8(values.data(), {}, 255, unit, back.data());
    EXPECT_EQ(back, q) << unit;
  }
}

TEST(Int8Unit, NeverMakesAnInfinity) {
  for (uint32_t bits = kNonFiniteBits - 1; bits > kNonFiniteBits - 100; --bits) {
    EXPECT_TRUE(std::isfinite(int8_value(-127, int8_unit(bits)))) << std::hex << bits;
    EXPECT_NEAR(int8_value(127, int8_unit(bits)) / float_of(bits), 1.0, 1e-6);
  }
  EXPECT_FALSE(std::isfinite(127.0f * float_of(kLargestInt8UnitBits + 1)));
  EXPECT_EQ(bits_of(int8_unit(1)), 0u);
}

TEST_P(Int8, RefusesTheLevelThatIsNone) {
  for (size_t n = 1; n < 140; ++n) {
    std::vector<int8_t> q(n, -127);
    std::vector<float> out(n);
    ASSERT_TRUE(kernels().dequantize_int8(q.data(), n, 1.0f, out.data(), kStore));
    for (size_t at : {size_t{0}, n / 2, n - 1}) {
      q[at] = -128;
      EXPECT_FALSE(kernels().dequantize_int8(q.data(), n, 1.0f, out.data(), kStore))
          << n << " " << at;
      EXPECT_FALSE(kernels().dequantize_int8(q.data(), n, 1.0f, out.data(), kAdd)) << n;
      q[at] = 0;
    }
  }
}

TEST_P(Int8, IsTheDefinitionInItsSpans) {
  Guarded<float> x(41000);
  Guarded<int8_t> levels(41000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const auto values = gradient_like(n, static_cast<uint32_t>(n));
    const float unit = n % 10 == 0 ? 0.0f : 1e-5f * static_cast<float>(n % 10);
    std::vector<int8_t> q(n);
    scalar().quantize_int8(values.data(), {}, n, unit, q.data());
    kernels().quantize_int8(x.take_copy(values, edge), {}, n, unit, levels.take(n, edge));
    ASSERT_EQ(levels.copy(), q) << n;
    ASSERT_TRUE(levels.outside_untouched()) << n;
    std::vector<float> want(n);
    ASSERT_TRUE(scalar().dequantize_int8(q.data(), n, unit, want.data(), kStore));
    ASSERT_TRUE(
        kernels().dequantize_int8(levels.take_copy(q, edge), n, unit, x.take(n, edge), kStore));
    ASSERT_SAME_BITS(x.copy(), want) << n;
    ASSERT_TRUE(x.outside_untouched()) << n;
    const auto sums = gradient_like(n, 3);
    for (size_t i = 0; i < n; ++i) want[i] += sums[i];
    ASSERT_TRUE(kernels().dequantize_int8(levels.take_copy(q, edge), n, unit,
                                          x.take_copy(sums, edge), kAdd));
    ASSERT_SAME_BITS(x.copy(), want) << n;
    ASSERT_TRUE(x.outside_untouched()) << n;
  }
}

// The new residual of b = x + r, within the spans.
TEST_P(Int8, TheResidualIsAddedAndKept) {
  Guarded<float> x(41000), r(41000);
  Guarded<uint16_t> r16(41000);
  Guarded<int8_t> levels(41000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    auto values = gradient_like(n, static_cast<uint32_t>(n));
    auto kept = gradient_like(n, 7);
    if (n > 2) values[1] = -kept[1], values[2] = kept[2] = -0.0f;
    const auto kept16 = narrowed(kept);
    const float unit = n % 10 == 0 ? 0.0f : 1e-5f * static_cast<float>(n % 10);
    std::vector<int8_t> want(n), want16(n);
    std::vector<float> left(n);
    std::vector<uint16_t> left16(n);
    for (size_t i = 0; i < n; ++i) {
      const float b = values[i] + kept[i];
      const float b16 = values[i] + widen_bf16(kept16[i]);
      want[i] = quantize_int8(b, unit);
      want16[i] = quantize_int8(b16, unit);
      left[i] = b - static_cast<float>(want[i]) * unit;
      left16[i] = narrow_bf16(b16 - static_cast<float>(want16[i]) * unit);
    }
    const float* px = x.take_copy(values, edge);
    kernels().quantize_int8(px, r.take_copy(kept, edge), n, unit, levels.take(n, edge));
    ASSERT_EQ(levels.copy(), want) << n;
    ASSERT_TRUE(levels.outside_untouched()) << n;
    ASSERT_SAME_BITS(r.copy(), left) << n;
    ASSERT_TRUE(r.outside_untouched()) << n;
    kernels().quantize_int8(px, r16.take_copy(kept16, edge), n, unit, levels.take(n, edge));
    ASSERT_EQ(levels.copy(), want16) << n;
    ASSERT_TRUE(levels.outside_untouched()) << n;
    ASSERT_EQ(r16.copy(), left16) << n;
    ASSERT_TRUE(r16.outside_untouched()) << n;
  }
}

}  // namespace
}  // namespace gradwire
