#include <utility>

#include "stages/element/float_bits.h"
#include "stages/ternary/nearest_trit.h"
#include "stages/trits/trit.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

class Ternary : public StageTest {
 protected:
  // The results of a table for x without a residual, with a float32 and with a bfloat16 residual.
  struct Result {
    std::vector<uint8_t> packed, packed_f32, packed_bf16;
    std::vector<float> r;
    std::vector<uint16_t> r16;
  };

  static Result run(const Kernels& table, const std::vector<float>& x, std::vector<float> r,
                    float m) {
    const size_t n = x.size();
    Result result;
    result.r16.resize(n);
    scalar().narrow_bf16(r.data(), n, result.r16.data());
    result.r = std::move(r);
    for (auto* packed : {&result.packed, &result.packed_f32, &result.packed_bf16}) {
      packed->resize(packed_size(n));
    }
    table.ternary_pack(x.data(), {}, n, m, result.packed.data());
    table.ternary_pack(x.data(), result.r.data(), n, m, result.packed_f32.data());
    table.ternary_pack(x.data(), result.r16.data(), n, m, result.packed_bf16.data());
    return result;
  }

  void expect_same_as_scalar(const std::vector<float>& x, const std::vector<float>& r, float m) {
    const Result got = run(kernels(), x, r, m);
    const Result want = run(scalar(), x, r, m);
    EXPECT_EQ(got.packed, want.packed);
    EXPECT_EQ(got.packed_f32, want.packed_f32);
    EXPECT_EQ(got.packed_bf16, want.packed_bf16);
    EXPECT_SAME_BITS(got.r, want.r);
    EXPECT_EQ(got.r16, want.r16);
  }
};
GRADWIRE_FOR_EACH_TABLE(Ternary);

// Trits + 1 in base 3, the first the most significant: written out by hand.
TEST_P(Ternary, GoldenBytes) {
  const std::vector<float> x = {
      4,  0,  0,  0,  -4,  // 2 1 1 1 0 = 162 + 27 + 9 + 3 + 0 = 201
      0,  0,  0,  0,  0,   // 1 1 1 1 1 = 121
      4,  4,  4,  4,  4,   // 242
      -4, -4, -4, -4, -4,  // 0
      0,  4,  -4, 0,  4,   // 1 2 0 1 2 = 81 + 54 + 0 + 3 + 2 = 140
      -4, 0,               // 0 1 1 1 1, padded = 27 + 9 + 3 + 1 = 40
  };
  std::vector<uint8_t> packed(6);
  kernels().ternary_pack(x.data(), {}, x.size(), 4.0f, packed.data());
  EXPECT_EQ(packed, (std::vector<uint8_t>{201, 121, 242, 0, 140, 40}));
}

TEST_P(Ternary, GoldenResidual) {
  const float m = 4.0f;  // so h = 2
  const std::vector<float> x = {1.0f, 1.0f, 2.5f, -3.0f, -0.0f, 3.0f};
  std::vector<float> r = {0.5f, 1.5f, -0.5f, -0.5f, -0.0f, -5.5f};
  std::vector<uint16_t> r16 = {0x3f00, 0x3fc0, 0xbf00, 0xbf00, 0x8000, 0xc0b0};  // the same
  std::vector<uint8_t> packed(2);
  kernels().ternary_pack(x.data(), r.data(), 6, m, packed.data());
  // b = 1.5, 2.5, 2 (a tie), -3.5, -0, -2.5: trits 0 + 0 - 0 | -
  EXPECT_EQ(packed, (std::vector<uint8_t>{81 + 2 * 27 + 9 + 0 + 1, 0 + 27 + 9 + 3 + 1}));
  EXPECT_SAME_BITS(r, (std::vector<float>{1.5f, -1.5f, 2.0f, 0.5f, -0.0f, 1.5f}));
  kernels().ternary_pack(x.data(), r16.data(), 6, m, packed.data());
  EXPECT_EQ(packed, (std::vector<uint8_t>{81 + 2 * 27 + 9 + 0 + 1, 0 + 27 + 9 + 3 + 1}));
  EXPECT_EQ(r16, (std::vector<uint16_t>{0x3fc0, 0xbfc0, 0x4000, 0x3f00, 0x8000, 0x3fc0}));
}

TEST_P(Ternary, TiesGoToZeroAndTheNextFloatDoesNot) {
  for (float m : {1.0f, 3.0f, FLT_MAX, FLT_MIN, 1e-44f, 0.0f}) {
    const float h = m * 0.5f;
    const float above = std::nextafter(h, INFINITY);
    const std::vector<float> x = {h, above, -h, -above, 0.0f};
    std::vector<uint8_t> packed(1);
    kernels().ternary_pack(x.data(), {}, 5, m, packed.data());
    EXPECT_EQ(packed[0], 81 + 2 * 27 + 9 + 0 + 1) << m;
    std::vector<float> r(5, 0.0f);
    kernels().ternary_pack(x.data(), r.data(), 5, m, packed.data());
    EXPECT_EQ(packed[0], 81 + 2 * 27 + 9 + 0 + 1) << m;
    EXPECT_SAME_BITS(r, (std::vector<float>{h + 0.0f, above - m, -h + 0.0f, m - above, 0.0f})) << m;
  }
}

// Every byte 0..242 from its trits, at every place of a block and of a tail.
TEST_P(Ternary, EveryByte) {
  for (size_t shift = 0; shift < 64; ++shift) {
    std::vector<float> x(5 * shift, 0.0f);
    std::vector<uint8_t> want(shift, 121);
    for (int byte = 0; byte < 243; ++byte) {
      want.push_back(static_cast<uint8_t>(byte));
      for (int weight : {81, 27, 9, 3, 1}) {
        x.push_back(static_cast<float>(byte / weight % 3 - 1));
      }
    }
    std::vector<float> r(x.size(), 0.0f);
    std::vector<uint8_t> packed(want.size());
    kernels().ternary_pack(x.data(), {}, x.size(), 1.0f, packed.data());
    ASSERT_EQ(packed, want) << shift;
    kernels().ternary_pack(x.data(), r.data(), x.size(), 1.0f, packed.data());
    ASSERT_EQ(packed, want) << shift;
    ASSERT_SAME_BITS(r, std::vector<float>(x.size(), 0.0f)) << shift;
  }
}

TEST_P(Ternary, EqualsScalarForAllLengths) {
  for (size_t n : lengths()) {
    SCOPED_TRACE(n);
    const uint32_t seed = static_cast<uint32_t>(n);
    const auto x = gradient_like(n, seed);
    const float a = float_of(scalar().absmax(x.data(), {}, n));
    for (float m : {a, 1.75f * a, 0.1f * a}) {
      expect_same_as_scalar(x, gradient_like(n, seed + 1), m);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Ternary, EqualsScalarOnAnyNumbers) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    const size_t n = 1000 + seed;
    for (float m : {0.0f, 1e-42f, 1e-20f, 1.0f, 1e30f, FLT_MAX}) {
      expect_same_as_scalar(any_numbers(n, seed), std::vector<float>(n, 0.0f), m);
      expect_same_as_scalar(any_numbers(n, seed), gradient_like(n, seed), m);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Ternary, EqualsScalarOnSpecialNumbers) {
  std::vector<float> x, r;
  for (float a : special_numbers()) {
    for (float b : special_numbers()) {
      x.push_back(a);
      r.push_back(b);
    }
  }
  for (float m : {0.0f, std::numeric_limits<float>::denorm_min(), FLT_MIN, 1.0f, 2.0f, FLT_MAX}) {
    SCOPED_TRACE(m);
    // Inf - Inf is a NaN whose sign isn't promised, so those residuals are only compared as NaN.
    Result got = run(kernels(), x, r, m);
    Result want = run(scalar(), x, r, m);
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::isnan(got.r[i]) && std::isnan(want.r[i])) got.r[i] = want.r[i] = 0.0f;
      if ((got.r16[i] & 0x7fff) == 0x7fc0) got.r16[i] &= 0x7fff;
      if ((want.r16[i] & 0x7fff) == 0x7fc0) want.r16[i] &= 0x7fff;
    }
    EXPECT_EQ(got.packed, want.packed);
    EXPECT_EQ(got.packed_f32, want.packed_f32);
    EXPECT_EQ(got.packed_bf16, want.packed_bf16);
    EXPECT_SAME_BITS(got.r, want.r);
    EXPECT_EQ(got.r16, want.r16);
  }
}

TEST_P(Ternary, NanIsZero) {
  const std::vector<float> x(400, std::nanf(""));
  std::vector<uint8_t> packed(80);
  kernels().ternary_pack(x.data(), {}, x.size(), 1.0f, packed.data());
  EXPECT_EQ(packed, std::vector<uint8_t>(80, 121));
}

TEST_P(Ternary, TouchesOnlyItsSpans) {
  Guarded<float> x(700), r(700);
  Guarded<uint16_t> r16(700);
  Guarded<uint8_t> packed(140);
  for (Edge edge : kEdges) {
    for (size_t n = 0; n <= 700; ++n) {
      const float* px = x.take_copy(gradient_like(n, 1), edge);
      float* pr = r.take_copy(gradient_like(n, 2), edge);
      uint16_t* pr16 = r16.take_copy(std::vector<uint16_t>(n, 0), edge);
      kernels().ternary_pack(px, {}, n, 1e-3f, packed.take(packed_size(n), edge));
      ASSERT_TRUE(packed.outside_untouched()) << n;
      kernels().ternary_pack(px, pr, n, 1e-3f, packed.take(packed_size(n), edge));
      ASSERT_TRUE(packed.outside_untouched() && r.outside_untouched()) << n;
      kernels().ternary_pack(px, pr16, n, 1e-3f, packed.take(packed_size(n), edge));
      ASSERT_TRUE(packed.outside_untouched() && r16.outside_untouched()) << n;
    }
  }
}

TEST(TernaryMultiplier, IsFiniteForEveryFiniteMaximum) {
  EXPECT_EQ(ternary_multiplier(bits_of(2.0f), 1.75f), 3.5f);
  EXPECT_EQ(ternary_multiplier(bits_of(FLT_MAX), 1.0f), FLT_MAX);
  EXPECT_EQ(ternary_multiplier(bits_of(FLT_MAX), 1.5f), FLT_MAX);
  EXPECT_EQ(ternary_multiplier(0, 1.5f), 0.0f);
}

}  // namespace
}  // namespace gradwire
