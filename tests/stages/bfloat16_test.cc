#include "stages/element/bfloat16.h"

#include "stages/element/float_bits.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

class Bfloat16 : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(Bfloat16);

TEST_P(Bfloat16, GoldenNarrowing) {
  const struct {
    uint32_t wide;
    uint16_t narrow;
  } kGolden[] = {
      {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x3f800000, 0x3f80},  // 0, -0, 1
      {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81},  // around half, even below
      {0x3f817fff, 0x3f81}, {0x3f818000, 0x3f82}, {0x3f818001, 0x3f82},  // around half, even above
      {0x00000001, 0x0000}, {0x00008000, 0x0000}, {0x00008001, 0x0001},  // denormals
      {0x7f7fffff, 0x7f80}, {0x7f7f7fff, 0x7f7f}, {0xff7fffff, 0xff80},  // FLT_MAX rounds to Inf
      {0x7f800000, 0x7f80}, {0xff800000, 0xff80},                        // Inf
      {0x7fc00000, 0x7fc0}, {0xffc00000, 0xffc0}, {0x7f800001, 0x7fc0},  // NaN
      {0xff800001, 0xffc0}, {0x7fffffff, 0x7fc0}, {0xffffffff, 0xffc0},
  };
  for (const auto& [wide, narrow] : kGolden) {
    const std::vector<float> x(67, float_of(wide));
    std::vector<uint16_t> out(67);
    kernels().narrow_bf16(x.data(), 67, out.data());
    EXPECT_EQ(out, std::vector<uint16_t>(67, narrow)) << std::hex << wide;
    kernels().narrow_bf16_finite(x.data(), 67, out.data());
    const bool infinite = (narrow & 0x7fff) == 0x7f80;
    EXPECT_EQ(out, std::vector<uint16_t>(67, infinite ? narrow - 1 : narrow)) << std::hex << wide;
  }
}

TEST_P(Bfloat16, WideningIsExactAndNarrowingUndoesIt) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(all.size());
  kernels().widen_bf16(all.data(), all.size(), wide.data(), kStore);
  std::vector<uint16_t> narrow(all.size());
  kernels().narrow_bf16(wide.data(), wide.size(), narrow.data());
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(bits_of(wide[i]), static_cast<uint32_t>(i) << 16);
    const bool is_nan = (i & 0x7fff) > 0x7f80;
    ASSERT_EQ(narrow[i], is_nan ? ((i & 0x8000) | 0x7fc0) : i) << std::hex << i;
  }
}

TEST_P(Bfloat16, WideningAdds) {
  const std::vector<uint16_t> x(50, 0x3fc0);  // 1.5
  std::vector<float> out(50, -0.25f);
  kernels().widen_bf16(x.data(), 50, out.data(), kAdd);
  EXPECT_SAME_BITS(out, std::vector<float>(50, 1.25f));
}

// Payloads of frames lie at any address.
TEST_P(Bfloat16, NarrowValuesAtOddAddresses) {
  for (size_t n = 0; n < 70; ++n) {
    const auto x = gradient_like(n, 1);
    std::vector<uint8_t> bytes(2 * n + 1);
    auto* narrow = reinterpret_cast<uint16_t*>(bytes.data() + 1);
    kernels().narrow_bf16(x.data(), n, narrow);
    std::vector<float> wide(n), sum = x, want(n), want_sum = x;
    kernels().widen_bf16(narrow, n, wide.data(), kStore);
    kernels().widen_bf16(narrow, n, sum.data(), kAdd);
    for (size_t i = 0; i < n; ++i) {
      want[i] = widen_bf16(narrow_bf16(x[i]));
      want_sum[i] += want[i];
    }
    ASSERT_SAME_BITS(wide, want) << n;
    ASSERT_SAME_BITS(sum, want_sum) << n;
  }
}

TEST_P(Bfloat16, EqualsScalarForAllLengthsWithinTheSpans) {
  Guarded<float> wide(41000);
  Guarded<uint16_t> narrow(41000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const auto x = any_numbers(n, static_cast<uint32_t>(n));
    std::vector<uint16_t> want(n);
    scalar().narrow_bf16(x.data(), n, want.data());
    kernels().narrow_bf16(wide.take_copy(x, edge), n, narrow.take(n, edge));
    ASSERT_EQ(narrow.copy(), want) << n;
    ASSERT_TRUE(narrow.outside_untouched()) << n;
    std::vector<uint16_t> want_finite(n);
    scalar().narrow_bf16_finite(x.data(), n, want_finite.data());
    kernels().narrow_bf16_finite(wide.take_copy(x, edge), n, narrow.take(n, edge));
    ASSERT_EQ(narrow.copy(), want_finite) << n;
    ASSERT_TRUE(narrow.outside_untouched()) << n;

    std::vector<float> want_wide(n);
    scalar().widen_bf16(want.data(), n, want_wide.data(), kStore);
    kernels().widen_bf16(narrow.take_copy(want, edge), n, wide.take(n, edge), kStore);
    ASSERT_SAME_BITS(wide.copy(), want_wide) << n;
    ASSERT_TRUE(wide.outside_untouched()) << n;

    auto want_sum = gradient_like(n, 1);
    wide.take_copy(want_sum, edge);
    scalar().widen_bf16(want.data(), n, want_sum.data(), kAdd);
    kernels().widen_bf16(narrow.take_copy(want, edge), n, wide.take_copy(gradient_like(n, 1), edge),
                         kAdd);
    ASSERT_SAME_BITS(wide.copy(), want_sum) << n;
    ASSERT_TRUE(wide.outside_untouched()) << n;
  }
}

}  // namespace
}  // namespace gradwire
