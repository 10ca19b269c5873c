// What quantized gradient descent promises (QSGD, section 3.3, and the paper's full version).

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/codecs/inputs.h"

namespace gradwire {
namespace {

Sent send(const std::vector<float>& x) { return {*Codec::parse("qgd").value(), x, {}}; }

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

double root_up(uint64_t n) { return std::ceil(std::sqrt(static_cast<double>(n))); }

std::vector<std::vector<float>> vectors(uint64_t n) {
  std::vector<float> equal(n, -0.1f);
  std::vector<float> cubes = gaussian(n, n);
  for (float& value : cubes) value = value * value * value;
  std::vector<float> lone(n);
  lone[n / 2] = -3.0f;
  std::vector<float> powers(n);
  for (uint64_t i = 0; i < n; ++i) powers[i] = std::pow(-0.7f, static_cast<float>(i));
  return {gaussian(n, n + 1), cubes, equal, lone, powers};
}

TEST(Qgd, SendsFewValuesThatDescend) {
  for (const uint64_t n : {1u, 2u, 9u, 10u, 1000u, 40961u, 100003u}) {
    for (const std::vector<float>& v : vectors(n)) {
      const std::vector<float> q = send(v).decoded;
      const double squares = dot(v, v);
      const double norm = std::sqrt(squares);
      uint64_t sent = 0;
      float least = FLT_MAX;
      float most_left_out = 0;
      double sum = 0;
      for (size_t i = 0; i < n; ++i) {
        if (q[i] == 0.0f) {
          most_left_out = std::max(most_left_out, std::fabs(v[i]));
          continue;
        }
        ++sent;
        sum += std::fabs(v[i]);
        least = std::min(least, std::fabs(v[i]));
        ASSERT_NEAR(q[i], std::copysign(norm, v[i]), 1e-6 * norm);
      }
      ASSERT_LE(most_left_out, least) << n;
      ASSERT_LE(static_cast<double>(sent), root_up(n));
      ASSERT_GE(sum, norm * (1 - 1e-6)) << n;
      ASSERT_LT(sum - least, norm) << "one less would do, " << n;
      ASSERT_GE(dot(v, q), squares * (1 - 1e-6)) << n;
      ASSERT_LE(dot(q, q), root_up(n) * squares * (1 + 1e-6)) << n;
    }
  }
}

TEST(Qgd, OfEqualMagnitudesTheFirstAreSent) {
  std::vector<float> v(30, 1.0f);
  v[20] = -2.0f;
  const std::vector<float> q = send(v).decoded;
  // The norm is sqrt(33) = 5.74, which 2 and four ones reach.
  for (size_t i = 0; i < v.size(); ++i) {
    EXPECT_FLOAT_EQ(q[i], i < 4 ? std::sqrt(33.0f) : i == 20 ? -std::sqrt(33.0f) : 0.0f) << i;
  }
}

// The full version of the paper counts sqrt(n) (log2 n + 1 + log2 e) + 32 bits.
TEST(Qgd, TakesNoMoreBitsThanThePaperCounts) {
  for (const uint64_t n : {1000u, 10000u, 100000u, 1000000u}) {
    const double bound = root_up(n) * (std::log2(n) + 1 + std::log2(std::exp(1.0))) + 32;
    for (const std::vector<float>& v : vectors(n)) {
      EXPECT_LE(8 * static_cast<double>(send(v).payload.size()), bound) << n;
    }
  }
}

// Least squares with eigenvalues from l = 0.1 to L = 1: the factor of spec.md in every step.
TEST(Qgd, DescentConvergesAtTheProvenRate) {
  constexpr uint64_t kN = 100;
  std::vector<double> eigenvalues(kN);
  for (uint64_t i = 0; i < kN; ++i) eigenvalues[i] = 0.1 + 0.9 * static_cast<double>(i) / (kN - 1);
  constexpr double kStep = 1.0 / 10;        // 1 / (L sqrt(n))
  constexpr double kFactor = 1 - 0.1 / 10;  // 1 - l / (L sqrt(n))
  for (uint64_t seed = 0; seed < 5; ++seed) {
    const std::vector<float> start = gaussian(kN, seed);
    std::vector<double> x(start.begin(), start.end());
    const auto value = [&] {
      double sum = 0;
      for (uint64_t i = 0; i < kN; ++i) sum += eigenvalues[i] * x[i] * x[i] / 2;
      return sum;
    };
    const double first = value();
    for (int step = 0; step < 300; ++step) {
      const double before = value();
      std::vector<float> gradient(kN);
      for (uint64_t i = 0; i < kN; ++i) gradient[i] = static_cast<float>(eigenvalues[i] * x[i]);
      const std::vector<float> q = send(gradient).decoded;
      for (uint64_t i = 0; i < kN; ++i) x[i] -= kStep * static_cast<double>(q[i]);
      ASSERT_LE(value(), kFactor * before * (1 + 1e-5)) << step;
    }
    EXPECT_LT(value(), first * 0.05);
  }
}

TEST(Qgd, TakesNoErrorFeedback) {
  const Status status = Codec::parse("qgd:ef=on").status();
  EXPECT_EQ(status.code(), StatusCode::kBadParameter);
  EXPECT_NE(status.message().find("ef"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace gradwire
