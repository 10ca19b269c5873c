#include "stages/signs/signs.h"

#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

class Signs : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(Signs);

TEST_P(Signs, GoldenSums) {
  const std::vector<float> x = {1, -2, 0, -0.0f, 3, -4};
  SignLanes lanes;
  kernels().add_sign_sums(x.data(), {}, x.size(), lanes);
  const SignSums sums = lanes.total();
  EXPECT_EQ(sums.positive, 4.0);
  EXPECT_EQ(sums.negative, -6.0);
  EXPECT_EQ(sums.negatives, 2u);
  const SignMeans means = SignMeans::create(sums, x.size());
  EXPECT_EQ(means.positive, 1.0f);
  EXPECT_EQ(means.negative, -3.0f);
}

TEST(SignMeansOf, NoValuesAndTheLargest) {
  EXPECT_EQ(bits_of(SignMeans::create({}, 0).positive), 0u);
  EXPECT_EQ(bits_of(SignMeans::create({.positive = 1}, 4).negative), 0u);
  EXPECT_EQ(SignMeans::create({.positive = 2.0 * FLT_MAX}, 1).positive, FLT_MAX);
  EXPECT_EQ(SignMeans::create({0, -3.0 * FLT_MAX, 2}, 2).negative, -FLT_MAX);
}

void expect_same_lanes(const SignLanes& got, const SignLanes& want) {
  for (size_t lane = 0; lane < kMomentLanes; ++lane) {
    ASSERT_EQ(got.positive[lane], want.positive[lane]) << lane;
    ASSERT_EQ(got.negative[lane], want.negative[lane]) << lane;
  }
  ASSERT_EQ(got.negatives, want.negatives);
}

// The values are 2^60 apart, so that any other order of the additions gives other bits. Two calls
// add them.
TEST_P(Signs, OrderIsTheDefinition) {
  Guarded<float> x(41000);
  for (size_t n : lengths()) {
    auto values = gradient_like(n, static_cast<uint32_t>(n));
    for (size_t i = 0; i < n; ++i) values[i] = std::ldexp(values[i], static_cast<int>(i % 7) * 10);
    SignLanes want;
    for (size_t i = 0; i < n; ++i) want.add(i, values[i]);
    SignLanes got;
    const float* copy = x.take_copy(values, kEdges[n % 2]);
    const size_t first = n / 3 / kMomentLanes * kMomentLanes;
    kernels().add_sign_sums(copy, {}, first, got);
    kernels().add_sign_sums(copy + first, {}, n - first, got);
    expect_same_lanes(got, want);
    if (HasFatalFailure()) FAIL() << n;
  }
}

TEST_P(Signs, TheResidualIsAdded) {
  Guarded<float> x(41000), r(41000);
  Guarded<uint16_t> r16(41000);
  Guarded<uint8_t> bits(6000);
  const SignMeans means = {0.001f, -0.003f};
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    auto values = gradient_like(n, static_cast<uint32_t>(n));
    auto kept = gradient_like(n, 7);
    if (n > 2) values[1] = -kept[1], values[2] = kept[2] = -0.0f;
    const auto kept16 = narrowed(kept);
    SignLanes want, want16;
    std::vector<uint8_t> signs(sign_bytes(n)), signs16(sign_bytes(n));
    std::vector<float> left(n);
    std::vector<uint16_t> left16(n);
    const auto set = [](std::vector<uint8_t>& bytes, size_t i) {
      bytes[i / 8] = static_cast<uint8_t>(bytes[i / 8] | 1 << i % 8);
    };
    for (size_t i = 0; i < n; ++i) {
      const float b = values[i] + kept[i];
      const float b16 = values[i] + widen_bf16(kept16[i]);
      want.add(i, b);
      want16.add(i, b16);
      if (b < 0) set(signs, i);
      if (b16 < 0) set(signs16, i);
      left[i] = b - (b < 0 ? means.negative : means.positive);
      left16[i] = narrow_bf16(b16 - (b16 < 0 ? means.negative : means.positive));
    }
    SignLanes got, got16;
    const float* px = x.take_copy(values, edge);
    float* pr = r.take_copy(kept, edge);
    uint16_t* pr16 = r16.take_copy(kept16, edge);
    kernels().add_sign_sums(px, pr, n, got);
    kernels().add_sign_sums(px, pr16, n, got16);
    expect_same_lanes(got, want);
    expect_same_lanes(got16, want16);
    if (HasFatalFailure()) FAIL() << n;
    kernels().pack_signs(px, pr, n, means, bits.take(signs.size(), edge));
    ASSERT_EQ(bits.copy(), signs) << n;
    ASSERT_TRUE(bits.outside_untouched()) << n;
    ASSERT_SAME_BITS(r.copy(), left) << n;
    ASSERT_TRUE(r.outside_untouched()) << n;
    kernels().pack_signs(px, pr16, n, means, bits.take(signs16.size(), edge));
    ASSERT_EQ(bits.copy(), signs16) << n;
    ASSERT_TRUE(bits.outside_untouched()) << n;
    ASSERT_EQ(r16.copy(), left16) << n;
    ASSERT_TRUE(r16.outside_untouched()) << n;
  }
}

TEST_P(Signs, NonFiniteValuesShowInTheSums) {
  for (float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::nanf(""),
        std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    for (size_t at : {0u, 17u, 99u}) {
      std::vector<float> x(100, -1.0f);
      x[at] = bad;
      SignLanes lanes;
      kernels().add_sign_sums(x.data(), {}, x.size(), lanes);
      const SignSums sums = lanes.total();
      EXPECT_FALSE(std::isfinite(sums.positive) && std::isfinite(sums.negative)) << bad;
    }
  }
}

TEST_P(Signs, BitsAreTheDefinitionAndComeBack) {
  Guarded<float> x(41000);
  Guarded<uint8_t> bits(6000);
  const SignMeans means = {0.1f, -0.3f};
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    auto values = gradient_like(n, static_cast<uint32_t>(n));
    if (n > 2) values[1] = 0.0f, values[2] = -0.0f;
    kernels().pack_signs(x.take_copy(values, edge), {}, n, {}, bits.take(sign_bytes(n), edge));
    const std::vector<uint8_t> bytes = bits.copy();
    ASSERT_TRUE(bits.outside_untouched()) << n;
    for (size_t i = 0; i < 8 * bytes.size(); ++i) {
      ASSERT_EQ(bytes[i / 8] >> i % 8 & 1, i < n && values[i] < 0 ? 1 : 0) << n << " " << i;
    }
    std::vector<float> want(n);
    const auto sums = gradient_like(n, 5);
    for (size_t i = 0; i < n; ++i) want[i] = values[i] < 0 ? means.negative : means.positive;
    ASSERT_TRUE(
        kernels().unpack_signs(bits.take_copy(bytes, edge), n, means, x.take(n, edge), kStore));
    ASSERT_SAME_BITS(x.copy(), want) << n;
    ASSERT_TRUE(x.outside_untouched()) << n;
    for (size_t i = 0; i < n; ++i) want[i] += sums[i];
    ASSERT_TRUE(kernels().unpack_signs(bits.take_copy(bytes, edge), n, means,
                                       x.take_copy(sums, edge), kAdd));
    ASSERT_SAME_BITS(x.copy(), want) << n;
    ASSERT_TRUE(x.outside_untouched()) << n;
  }
}

TEST_P(Signs, PaddingIsRefused) {
  for (size_t n = 1; n < 70; ++n) {
    std::vector<uint8_t> bytes(sign_bytes(n), 0xff);
    std::vector<float> out(n);
    EXPECT_EQ(kernels().unpack_signs(bytes.data(), n, {}, out.data(), kStore), n % 8 == 0);
    EXPECT_EQ(kernels().unpack_signs(bytes.data(), n, {}, out.data(), kAdd), n % 8 == 0);
  }
}

}  // namespace
}  // namespace gradwire
