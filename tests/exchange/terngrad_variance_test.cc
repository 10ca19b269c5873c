// The mean from TernGrad's exchange has no bias and less variance than with pulls that are drawn.

#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"

#include "tests/exchange/terngrad_ranks.h"

namespace gradwire {
namespace {

// Compares mean and variance over many seeds with the formula of exchange.h.
TEST(TernGradVariance, HasNoBiasAndTheVarianceOfItsDrawsOverN) {
  constexpr uint32_t kWorld = 4;
  constexpr uint64_t kSeeds = 400;
  const std::vector<TensorInfo> tensors = {{"only", {4000, 1}}};
  const Buckets inputs = uneven_buckets(kWorld, 4000, 5);
  float scale = 0;
  for (const auto& bucket : inputs) {
    for (float value : bucket) scale = std::max(scale, std::fabs(value));
  }
  std::vector<double> sum(4000), squares(4000);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Cluster cluster(terngrad(seed), kWorld, "terngrad:clip=0", tensors);
    Buckets buckets = inputs;
    ASSERT_TRUE(cluster.step(buckets, seed).ok());
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += buckets[0][i];
      squares[i] += double{buckets[0][i]} * buckets[0][i];
    }
  }
  double chi = 0;
  double measured = 0;
  double expected = 0;
  for (size_t i = 0; i < sum.size(); ++i) {
    double mean = 0;
    double variance = 0;
    for (const auto& bucket : inputs) {
      mean += double{bucket[i]} / kWorld;
      const double b = std::fabs(bucket[i]);
      variance += b * (scale - b) / (kWorld * kWorld);
    }
    const double average = sum[i] / kSeeds;
    const double off = average - mean;
    ASSERT_LE(std::fabs(off), 6 * std::sqrt(variance / kSeeds)) << i;
    chi += off * off / (variance / kSeeds);
    measured += (squares[i] / kSeeds - average * average) * kSeeds / (kSeeds - 1);
    expected += variance;
  }
  EXPECT_NEAR(chi / 4000, 1.0, 6 * std::sqrt(2.0 / 4000));
  EXPECT_NEAR(measured / expected, 1.0, 0.02);
}

// The squared error of the mean over some steps, without clipping.
double squared_error(const MakeExchange& make, uint32_t world, const LayoutOptions& options) {
  double error = 0;
  for (uint64_t step = 0; step < 4; ++step) {
    Cluster cluster(make, world, options, {{"only", {world, 4096}}});
    Buckets buckets = uneven_buckets(world, cluster.numel(), step);
    std::vector<double> mean(cluster.numel());
    for (const auto& bucket : buckets) {
      for (size_t i = 0; i < mean.size(); ++i) mean[i] += double{bucket[i]} / world;
    }
    EXPECT_TRUE(cluster.step(buckets, step).ok());
    for (size_t i = 0; i < mean.size(); ++i) {
      error += (buckets[0][i] - mean[i]) * (buckets[0][i] - mean[i]);
    }
  }
  return error;
}

TEST(TernGradVariance, ErrsLessThanTheShardedExchangeWhosePullsAreDrawnAgain) {
  const MakeExchange sharded = [](const std::shared_ptr<const Layout>& layout, uint32_t rank) {
    return make_exchange("sharded", layout, rank, Execution::create().value()).value();
  };
  for (uint32_t world : {2u, 8u, 16u}) {
    const double shared = squared_error(terngrad(), world, {.codec = "terngrad:clip=0"});
    const double drawn_twice = squared_error(sharded, world, {.codec = "terngrad:clip=0"});
    const double raw_pulls =
        squared_error(sharded, world, {.codec = "terngrad:clip=0", .pull_codec = "raw"});
    EXPECT_LT(shared, drawn_twice / 1.5) << world;
    // Sharing a scale costs less than the factor between the largest scale and the others, 1.75
    // here. With two ranks, half of the values are the owner's own, which the sharded exchange does
    // not draw.
    EXPECT_GT(shared, raw_pulls) << world;
    EXPECT_LT(shared, raw_pulls * 1.8 * world / (world - 1)) << world;
  }
}

}  // namespace
}  // namespace gradwire
