// Each rank, tensor and step of an exchange has its own random words.

#include <array>
#include <cmath>
#include <memory>
#include <vector>

#include "gtest/gtest.h"

#include "engines/loopback/loopback.h"
#include "gradwire/exchange.h"

namespace gradwire {
namespace {

constexpr uint64_t kValues = 1 << 16;

using Counts = std::array<std::array<double, 3>, 3>;

// Pearson's chi-square of a table whose expected shares are known; 8 degrees of freedom.
double chi_square(const Counts& counts) {
  constexpr double kShare[] = {0.25, 0.5, 0.25};  // of 0, 1 and 2 in two fair draws
  double sum = 0;
  for (size_t a = 0; a < 3; ++a) {
    for (size_t b = 0; b < 3; ++b) {
      const double expected = kShare[a] * kShare[b] * kValues;
      sum += (counts[a][b] - expected) * (counts[a][b] - expected) / expected;
    }
  }
  return sum;
}

Counts table(const std::vector<int>& a, const std::vector<int>& b) {
  Counts counts{};
  for (size_t i = 0; i < kValues; ++i) ++counts[a[i]][b[i]];
  return counts;
}

// Three ranks exchange two tensors of 0.5 (and one 1.0, the scale). The result gives, by step and
// tensor, how many of the two ranks that don't own the tensor sent a 1 for each value.
std::vector<std::vector<int>> ones(uint64_t steps) {
  constexpr uint32_t kWorld = 3;
  LayoutOptions options;
  options.codec = "stoch3";
  options.pull_codec = "raw";
  const std::vector<TensorInfo> tensors = {
      {"a.weight", {kValues, 1}}, {"b.weight", {kValues, 1}}, {"c.weight", {kValues, 1}}};
  const auto layout =
      std::make_shared<const Layout>(Layout::create(tensors, kWorld, options).value());
  EXPECT_EQ(layout->segments().size(), 3u) << "one segment a tensor";
  std::vector<std::unique_ptr<Exchange>> ranks;
  std::vector<Exchange*> exchanges;
  for (uint32_t rank = 0; rank < kWorld; ++rank) {
    ranks.push_back(make_exchange("sharded", layout, rank, Execution::create().value()).value());
    exchanges.push_back(ranks.back().get());
  }
  std::vector<std::vector<int>> all;
  for (uint64_t step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> buckets(kWorld, std::vector<float>(3 * kValues, 0.5f));
    std::vector<std::span<float>> spans;
    for (auto& bucket : buckets) {
      for (size_t t = 0; t < 3; ++t) bucket[t * kValues] = 1.0f;
      spans.emplace_back(bucket);
    }
    EXPECT_TRUE(run_loopback_step(exchanges, spans, step, {}).ok());
    for (size_t t = 0; t < 3; ++t) {
      std::vector<int> sums(kValues);
      for (size_t i = 1; i < kValues; ++i) {
        sums[i] = static_cast<int>(std::lround(3 * buckets[0][t * kValues + i] - 0.5f));
      }
      all.push_back(std::move(sums));
    }
  }
  return all;
}

TEST(Draws, OfRanksTensorsAndStepsAreIndependent) {
  const auto sums = ones(2);
  // 99.9999 % of chi-squares are below 42. Ranks with equal words would give only 0 and 2.
  for (size_t a = 0; a < sums.size(); ++a) {
    for (size_t b = a + 1; b < sums.size(); ++b) {
      EXPECT_LT(chi_square(table(sums[a], sums[b])), 42.0) << a << " " << b;
    }
    EXPECT_GT(chi_square(table(sums[a], sums[a])), 42.0) << "the test can tell";
  }
}

}  // namespace
}  // namespace gradwire
