#include <algorithm>

#include "stages/element/float_bits.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

class Absmax : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(Absmax);

TEST_P(Absmax, OfNothingIsZero) { EXPECT_EQ(kernels().absmax(nullptr, {}, 0), 0u); }

TEST_P(Absmax, GoldenValues) {
  const float x[] = {1.0f, -3.0f, 2.0f, -0.0f};
  float r[] = {0.5f, 1.0f, 1.0f, 0.0f};
  uint16_t r16[] = {0x3f00, 0x3f80, 0x3f80, 0};        // 0.5, 1, 1, 0
  EXPECT_EQ(kernels().absmax(x, {}, 4), 0x40400000u);  // 3
  EXPECT_EQ(kernels().absmax(x, r, 4), 0x40400000u);   // 2 + 1
  EXPECT_EQ(kernels().absmax(x, r, 2), 0x40000000u);   // |-3 + 1|
  EXPECT_EQ(kernels().absmax(x, r16, 4), 0x40400000u);
  EXPECT_EQ(kernels().absmax(x, r16, 1), 0x3fc00000u);  // 1 + 0.5
  EXPECT_EQ(kernels().absmax(x + 3, {}, 1), 0u);        // -0
}

TEST_P(Absmax, SeesEveryElementAndNothingElse) {
  constexpr size_t kMost = 150;
  Guarded<float> x(kMost);
  Guarded<float> r(kMost);
  Guarded<uint16_t> r16(kMost);
  for (Edge edge : kEdges) {
    for (size_t n = 1; n <= kMost; ++n) {
      float* px = x.take(n, edge);
      float* pr = r.take(n, edge);
      uint16_t* pr16 = r16.take(n, edge);
      std::fill(px, px + n, 1.0f);
      std::fill(pr, pr + n, 0.0f);
      std::fill(pr16, pr16 + n, uint16_t{0});
      for (size_t i = 0; i < n; ++i) {
        px[i] = -2.0f;
        ASSERT_EQ(kernels().absmax(px, {}, n), bits_of(2.0f)) << n << " " << i;
        ASSERT_EQ(kernels().absmax(px, pr, n), bits_of(2.0f)) << n << " " << i;
        ASSERT_EQ(kernels().absmax(px, pr16, n), bits_of(2.0f)) << n << " " << i;
        px[i] = 1.0f;
        pr[i] = 4.0f;
        pr16[i] = 0xc040;  // -3
        ASSERT_EQ(kernels().absmax(px, pr, n), bits_of(5.0f)) << n << " " << i;
        ASSERT_EQ(kernels().absmax(px, pr16, n), bits_of(2.0f)) << n << " " << i;
        pr[i] = 0.0f;
        pr16[i] = 0;
      }
    }
  }
}

TEST_P(Absmax, ShowsEveryNonFiniteElement) {
  constexpr size_t n = 133;
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> x(n, FLT_MAX);
  std::vector<float> r(n, 0.0f);
  std::vector<uint16_t> r16(n, 0);
  EXPECT_EQ(kernels().absmax(x.data(), {}, n), kNonFiniteBits - 1);
  for (float bad : {infinity, -infinity, std::nanf(""), -std::nanf("1"), float_of(0x7f800001u),
                    float_of(0xffffffffu)}) {
    for (size_t i = 0; i < n; ++i) {
      x[i] = bad;
      const bool is_nan = std::isnan(bad);
      for (uint32_t bits :
           {kernels().absmax(x.data(), {}, n), kernels().absmax(x.data(), r.data(), n),
            kernels().absmax(x.data(), r16.data(), n)}) {
        ASSERT_GE(bits, kNonFiniteBits);
        ASSERT_EQ(bits > kNonFiniteBits, is_nan);
      }
      x[i] = FLT_MAX;
    }
  }
}

// A sum that overflows shows like an Inf of the input.
TEST_P(Absmax, ShowsOverflowOfTheSum) {
  const std::vector<float> x(40, FLT_MAX);
  std::vector<float> r(40, 0.0f);
  r[17] = FLT_MAX;
  EXPECT_EQ(kernels().absmax(x.data(), r.data(), 40), kNonFiniteBits);
}

TEST_P(Absmax, EqualsScalarForAllLengths) {
  Guarded<float> x(41000);
  Guarded<float> r(41000);
  Guarded<uint16_t> r16(41000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const uint32_t seed = static_cast<uint32_t>(n);
    const auto* px = x.take_copy(n % 3 == 0 ? any_numbers(n, seed) : gradient_like(n, seed), edge);
    auto* pr = r.take_copy(gradient_like(n, seed + 1), edge);
    std::vector<uint16_t> narrow(n);
    scalar().narrow_bf16(pr, n, narrow.data());
    auto* pr16 = r16.take_copy(narrow, edge);
    ASSERT_EQ(kernels().absmax(px, {}, n), scalar().absmax(px, {}, n)) << n;
    ASSERT_EQ(kernels().absmax(px, pr, n), scalar().absmax(px, pr, n)) << n;
    ASSERT_EQ(kernels().absmax(px, pr16, n), scalar().absmax(px, pr16, n)) << n;
  }
}

}  // namespace
}  // namespace gradwire
