#include "stages/element/bfloat16.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

class Threshold : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(Threshold);

TEST_P(Threshold, GoldenBits) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {1.0f, -1.0f,    0.99999994f, -0.99999994f,
                                nan,  infinity, -infinity,   0};
  std::vector<float> all;
  for (int i = 0; i < 9; ++i) all.insert(all.end(), x.begin(), x.end());
  uint64_t mask[2] = {};
  kernels().threshold_bits(all.data(), all.size(), 1.0f, mask);
  EXPECT_EQ(mask[0], 0x6363636363636363u);
  EXPECT_EQ(mask[1], 0x63u);
  float out[72];
  uint64_t taken[2] = {};
  EXPECT_EQ(kernels().take_large(all.data(), {}, all.size(), 1.0f, taken, out), 36u);
  EXPECT_EQ(taken[0], mask[0]);
  EXPECT_EQ(taken[1], mask[1]);
  EXPECT_EQ(out[0], 1.0f);
  EXPECT_EQ(out[1], -1.0f);
  EXPECT_EQ(out[35], -infinity);
}

TEST_P(Threshold, AsTheDefinitionWithinItsSpans) {
  Guarded<float> x(41000);
  Guarded<uint64_t> mask(700);
  const Kernels& scalar = *find_kernels("scalar");
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const auto values = any_numbers(n, static_cast<uint32_t>(n));
    for (float t : {std::numeric_limits<float>::denorm_min(), 1e-3f, 1e30f}) {
      std::vector<uint64_t> want((n + 63) / 64);
      scalar.threshold_bits(values.data(), n, t, want.data());
      const float* from = x.take_copy(values, edge);
      kernels().threshold_bits(from, n, t, mask.take(want.size(), edge));
      ASSERT_EQ(mask.copy(), want) << n;
      ASSERT_TRUE(mask.outside_untouched()) << n;
    }
  }
}

// The values that are taken, and the new residual of b = x + r.
TEST_P(Threshold, LargeValuesAreTakenOutOfTheResidual) {
  Guarded<float> x(41000), r(41000), out(41000);
  Guarded<uint16_t> r16(41000);
  Guarded<uint64_t> mask(700);
  const float t = 3e-3f;
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const auto values = gradient_like(n, static_cast<uint32_t>(n));
    const auto kept = gradient_like(n, 7);
    const auto kept16 = narrowed(kept);
    std::vector<float> b = values, left(n), taken;
    std::vector<uint64_t> bits((n + 63) / 64);
    const auto take = [&] {
      taken.clear();
      std::fill(bits.begin(), bits.end(), 0);
      for (size_t i = 0; i < n; ++i) {
        const bool large = std::abs(b[i]) >= t;
        if (large) taken.push_back(b[i]);
        bits[i / 64] |= uint64_t{large} << i % 64;
        left[i] = large ? 0.0f : b[i];
      }
    };
    const auto expect = [&](size_t count) {
      ASSERT_EQ(mask.copy(), bits) << n;
      ASSERT_TRUE(mask.outside_untouched()) << n;
      ASSERT_EQ(count, taken.size()) << n;
      const std::vector<float> got = out.copy();
      ASSERT_SAME_BITS(std::vector<float>(got.data(), got.data() + count), taken) << n;
      ASSERT_TRUE(out.outside_untouched()) << n;
    };
    const float* px = x.take_copy(values, edge);
    take();
    expect(kernels().take_large(px, {}, n, t, mask.take(bits.size(), edge), out.take(n, edge)));
    for (size_t i = 0; i < n; ++i) b[i] = values[i] + kept[i];
    take();
    expect(kernels().take_large(px, r.take_copy(kept, edge), n, t, mask.take(bits.size(), edge),
                                out.take(n, edge)));
    ASSERT_SAME_BITS(r.copy(), left) << n;
    ASSERT_TRUE(r.outside_untouched()) << n;
    for (size_t i = 0; i < n; ++i) b[i] = values[i] + widen_bf16(kept16[i]);
    take();
    expect(kernels().take_large(px, r16.take_copy(kept16, edge), n, t, mask.take(bits.size(), edge),
                                out.take(n, edge)));
    ASSERT_EQ(r16.copy(), narrowed(left)) << n;
    ASSERT_TRUE(r16.outside_untouched()) << n;
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace gradwire
