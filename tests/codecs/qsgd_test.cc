// The properties that QSGD promises (Alistarh et al. 2017, section 3), with fixed seeds.

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/codecs/inputs.h"

namespace gradwire {
namespace {

Sent send(const std::string& spec, const std::vector<float>& x, uint64_t step = 0) {
  return {*Codec::parse(spec).value(), x, {.seed = 3, .stream = 4, .step = step}};
}

double squares(const std::vector<float>& x) {
  double sum = 0;
  for (float value : x) sum += static_cast<double>(value) * value;
  return sum;
}

// Lemma 3.1; one group is the paper's vector.
TEST(Qsgd, IsUnbiasedWithBoundedVarianceAndFewNonZeros) {
  constexpr int kSteps = 3000;
  for (const uint64_t n : {16u, 256u}) {
    const std::vector<float> x = gaussian(n, n);
    const double norm2 = squares(x);
    const double root = std::sqrt(static_cast<double>(n));
    for (const int s : {1, 2, 5, 16, 127, 300}) {
      const std::string spec = "qsgd:norm=l2,bucket=1024,levels=" + std::to_string(s);
      std::vector<double> sum(n);
      double error = 0;
      double non_zeros = 0;
      for (int step = 0; step < kSteps; ++step) {
        const std::vector<float> y = send(spec, x, static_cast<uint64_t>(step)).decoded;
        for (uint64_t i = 0; i < n; ++i) {
          sum[i] += y[i];
          error += std::pow(static_cast<double>(y[i]) - x[i], 2);
          non_zeros += y[i] != 0;
        }
      }
      // The mean of 3000 draws between neighbouring levels is off by at most five standard
      // deviations.
      const double unit = std::sqrt(norm2) / s;
      for (uint64_t i = 0; i < n; ++i) {
        EXPECT_NEAR(sum[i] / kSteps, x[i], 5 * unit * 0.5 / std::sqrt(kSteps)) << spec << " " << i;
      }
      const double dn = static_cast<double>(n);
      EXPECT_LE(error / kSteps, std::min(dn / (s * s), root / s) * norm2) << spec;
      EXPECT_LE(non_zeros / kSteps, s * (s + root)) << spec;
    }
  }
}

// The same with the largest magnitude as the norm, which gives no larger variance.
TEST(Qsgd, IsUnbiasedWithTheLargestMagnitudeToo) {
  const std::vector<float> x = gaussian(96, 1);
  std::vector<double> sum(x.size());
  constexpr int kSteps = 4000;
  for (uint64_t step = 0; step < kSteps; ++step) {
    const auto y = send("qsgd:bucket=32,bits=3", x, step).decoded;
    for (size_t i = 0; i < x.size(); ++i) sum[i] += y[i];
  }
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_NEAR(sum[i] / kSteps, x[i], 5 * 0.5 * 3.5 / 3 / std::sqrt(kSteps)) << i;
  }
}

// Theorem 3.2 with o(1) = 0.
TEST(Qsgd, SparseCodeKeepsThePapersBound) {
  for (const uint64_t n : {1024u, 16384u, 262144u}) {
    const std::vector<float> x = gaussian(n, n);
    const double root = std::sqrt(static_cast<double>(n));
    for (const int s : {1, 2, 4, 8}) {
      const double most = s * (s + root);
      const double bound =
          (3 + 1.5 * std::log2(2 * (s * s + static_cast<double>(n)) / most)) * most + 32;
      const Sent sent =
          send("qsgd:coder=elias,norm=l2,bucket=4294967288,levels=" + std::to_string(s), x);
      EXPECT_LE(8 * static_cast<double>(sent.payload.size()), bound) << n << " " << s;
    }
  }
}

// Corollary 3.3: 2.8 n + 32 bits for s = sqrt(n). Values whose tails are as heavy as those of
// Laplace's distribution keep it, and gradients have such tails. Gaussian values do not: the Elias
// code of magnitude 1 and its sign take 4 bits, of which equal magnitudes use all. No vector takes
// more on average: a draw costs 1 + 3 x bits where x = |v| s / norm is at most 1, and less than 4 +
// 3 (x - 1) / 2 above; this is concave in x^2, whose mean is 1.
TEST(Qsgd, DenseCodeKeepsThePapersBoundForTailsLikeGradients) {
  const auto of = [](const std::vector<float>& x, const auto& change) {
    std::vector<float> changed = x;
    for (float& value : changed) value = change(value);
    return changed;
  };
  for (const auto& [n, s] : {std::pair{10000u, 100}, {99856u, 316}, {1000000u, 1000}}) {
    const std::string spec =
        "qsgd:coder=elias-dense,norm=l2,bucket=4294967288,levels=" + std::to_string(s);
    const auto mean_bits = [&](const std::vector<float>& x) {
      constexpr uint64_t kSteps = 5;
      double bits = 0;
      for (uint64_t step = 0; step < kSteps; ++step) {
        bits += 8 * static_cast<double>(send(spec, x, step).payload.size()) / kSteps;
      }
      return bits;
    };
    const std::vector<float> normal = gaussian(n, n);
    const std::vector<float> uniform = of(normal, [](float v) { return std::erf(v / 1.41421f); });
    const std::vector<float> laplace = of(
        uniform, [](float v) { return std::copysign(std::log1p(-std::fabs(v) * 0.999999f), v); });
    const std::vector<float> cubes = of(normal, [](float v) { return v * v * v; });
    const std::vector<float> equal = of(normal, [](float v) { return std::copysign(1.0f, v); });
    const double bound = 2.8 * n + 32;
    for (const auto* x : {&laplace, &cubes}) EXPECT_LE(mean_bits(*x), bound) << n;
    EXPECT_NEAR(mean_bits(cubes) / n, 1.9, 0.05) << n;
    EXPECT_NEAR(mean_bits(laplace) / n, 2.70, 0.02) << n;
    EXPECT_NEAR(mean_bits(normal) / n, 2.94, 0.02) << n;
    EXPECT_NEAR(mean_bits(equal) / n, 4, 0.01) << n;
    EXPECT_NEAR(mean_bits(uniform) / n, 3.13, 0.02) << n;
  }
}

TEST(Qsgd, ALoneLargeValueKeepsItsLevel) {
  for (const char* coder : {"fixed", "elias", "elias-dense"}) {
    for (const int s : {1, 3, 100, 127, 1000, 8191}) {
      for (const char* norm : {"max", "l2"}) {
        for (const float large : {1.0f, -0.1f, 3e-39f, FLT_MAX, -FLT_MAX}) {
          std::vector<float> x(600);
          x[511] = large;
          const std::string spec =
              std::string("qsgd:coder=") + coder + ",norm=" + norm + ",levels=" + std::to_string(s);
          const std::vector<float> y = send(spec, x).decoded;
          for (size_t i = 0; i < x.size(); ++i) {
            if (i == 511) continue;
            ASSERT_EQ(std::bit_cast<uint32_t>(y[i]), 0u) << spec;
          }
          // A denormal unit is rounded up by at most 2^-149.
          ASSERT_NEAR(y[511], large, std::fabs(large) * 3e-7f + static_cast<float>(s) * 0x1p-149f)
              << spec;
        }
      }
    }
  }
}

TEST(Qsgd, AMillionEqualValuesDontRoundTogether) {
  std::vector<float> x(1000000, 0.25f);
  for (size_t i = 0; i < x.size(); i += 512) x[i] = 1.0f;
  const std::vector<float> y = send("qsgd:bits=2", x).decoded;
  double up = 0;
  std::vector<int> ups_in_bucket(x.size() / 512 + 1);
  for (size_t i = 0; i < x.size(); ++i) {
    if (i % 512 == 0) continue;
    ASSERT_TRUE(y[i] == 0.0f || y[i] == 1.0f);
    up += y[i];
    ups_in_bucket[i / 512] += y[i] == 1.0f;
  }
  const double count = static_cast<double>(x.size()) * 511 / 512;
  EXPECT_NEAR(up / count, 0.25, 5 * std::sqrt(0.25 * 0.75 / count));
  // Each group has 511 draws: the mean is 127.75, the standard deviation 9.8.
  double deviation = 0;
  for (size_t i = 0; i + 1 < ups_in_bucket.size(); ++i) {
    deviation += std::pow(ups_in_bucket[i] - 127.75, 2);
  }
  EXPECT_NEAR(std::sqrt(deviation / static_cast<double>(ups_in_bucket.size() - 1)), 9.79, 0.6);
  // Another step has other draws.
  EXPECT_NE(send("qsgd:bits=2", x, 1).decoded, y);
}

TEST(Qsgd, ZerosAreSentAsNothing) {
  for (const char* spec : {"qsgd", "qsgd:norm=l2", "qsgd:coder=elias", "qsgd:coder=elias-dense"}) {
    std::vector<float> x(1000);
    x[3] = -0.0f;
    const Sent sent = send(spec, x);
    EXPECT_TRUE(sent.payload.empty()) << spec;
    for (float value : sent.decoded) ASSERT_EQ(std::bit_cast<uint32_t>(value), 0u) << spec;
    // A group of zeros beside another group gives no NaN.
    x[700] = 1.0f;
    const std::vector<float> y = send(spec, x).decoded;
    for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(y[i], x[i], 1e-6f) << spec << " " << i;
  }
}

TEST(Qsgd, SpecialInputs) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (const char* spec : {"qsgd", "qsgd:bits=8,coder=elias", "qsgd:norm=l2,coder=elias-dense",
                           "qsgd:levels=1000", "qsgd:levels=8191,coder=elias-dense"}) {
    EXPECT_TRUE(send(spec, {}).payload.empty());
    EXPECT_NEAR(send(spec, {-2.5f}).decoded[0], -2.5f, 1e-6f) << spec;
    // With denormals the unit is the smallest float, so that each value is a whole level.
    EXPECT_EQ(send(spec, {tiny, -2 * tiny, 0.0f}).decoded,
              (std::vector<float>{tiny, -2 * tiny, 0.0f}))
        << spec;
    for (float value : send(spec, std::vector<float>(999, 3.0f)).decoded) {
      ASSERT_GE(value, 0.0f) << spec;
      ASSERT_LE(value, std::sqrt(999.0f) * 3) << spec;
    }
  }
  for (float value : send("qsgd", std::vector<float>(999, 3.0f)).decoded) {
    EXPECT_NEAR(value, 3.0f, 1e-6f);
  }
}

// A shorter last group and chunk, groups across chunks, a single value.
TEST(Qsgd, ErrsByLessThanAStep) {
  for (const uint64_t n : {1u, 513u, 40961u, 100003u}) {
    for (const uint64_t bucket : {8u, 512u, 1000u, 50000u}) {
      for (const char* coder : {"fixed", "elias", "elias-dense"}) {
        const std::vector<float> x = gaussian(n, n);
        const std::vector<float> y =
            send("qsgd:bits=5,bucket=" + std::to_string(bucket) + ",coder=" + coder, x).decoded;
        for (uint64_t first = 0; first < n; first += bucket) {
          const uint64_t end = std::min(n, first + bucket);
          float largest = 0;
          for (uint64_t i = first; i < end; ++i) largest = std::max(largest, std::fabs(x[i]));
          for (uint64_t i = first; i < end; ++i) {
            ASSERT_LE(std::fabs(x[i] - y[i]), largest / 15 * 1.000001f) << n << " " << bucket;
          }
        }
      }
    }
  }
}

// Chunks of Elias codes whose levels fit an int8 are coded by other loops than those with larger
// levels.
TEST(Qsgd, LevelsAtTheBordersOfBytesAreExact) {
  for (const char* coder : {"fixed", "elias", "elias-dense"}) {
    for (const int s : {127, 128, 129, 255, 256, 8191}) {
      for (const int other : {-s, 127, -127, 128, -128, -129, 0}) {
        if (std::abs(other) > s) continue;
        std::vector<float> x(300);
        x[7] = static_cast<float>(s);
        x[200] = static_cast<float>(other);
        const std::string spec =
            std::string("qsgd:bucket=320,coder=") + coder + ",levels=" + std::to_string(s);
        EXPECT_EQ(send(spec, x).decoded, x) << spec << " " << other;
        // All levels of the second chunk are small.
        std::vector<float> apart(kChunkValues + 320);
        apart[0] = static_cast<float>(s);
        apart[kChunkValues] = apart[kChunkValues - 1] = static_cast<float>(s) / 256;
        const std::vector<float> back =
            send("qsgd:bucket=81920,coder=" + std::string(coder) + ",levels=" + std::to_string(s),
                 apart)
                .decoded;
        EXPECT_EQ(back[0], apart[0]);
        EXPECT_NEAR(back[kChunkValues], apart[kChunkValues], 1);
      }
    }
  }
}

TEST(Qsgd, RefusesUnitsThatNoEncoderWrites) {
  Execution execution = Execution::create().value();
  const auto codec = Codec::parse("qsgd:levels=31").value();
  const auto decode = [&](uint32_t unit) {
    std::vector<std::byte> payload(5);
    for (int i = 0; i < 4; ++i) payload[i] = static_cast<std::byte>(unit >> 8 * i);
    payload[4] = std::byte{31};  // level 0
    std::vector<float> out(1);
    return codec->decode(payload, out, DecodeMode::kStore, execution).code();
  };
  const uint32_t largest = std::bit_cast<uint32_t>(FLT_MAX / 31);
  const bool fits = std::isfinite(FLT_MAX / 31 * 31);
  EXPECT_EQ(decode(std::bit_cast<uint32_t>(1.0f)), StatusCode::kOk);
  EXPECT_EQ(decode(1), StatusCode::kOk);
  EXPECT_EQ(decode(fits ? largest : largest - 1), StatusCode::kOk);
  for (uint32_t unit :
       {0u, 0x80000000u, 0x7f800000u, 0x7fc00000u, 0xbf800000u, fits ? largest + 1 : largest}) {
    EXPECT_EQ(decode(unit), StatusCode::kCorruptPayload) << std::hex << unit;
  }
}

}  // namespace
}  // namespace gradwire
