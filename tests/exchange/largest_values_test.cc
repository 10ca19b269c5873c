// Gradients near the largest float, whose sums with a residual overflow.

#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gradwire/exchange_choice.h"
#include "tests/exchange/cluster.h"

namespace gradwire {
namespace {

constexpr uint32_t kRanks = 3;
constexpr uint32_t kBad = 1;  // encodes its part of rank 0's shard, in a ring as the first

std::vector<const ExchangeInfo*> with_residuals() {
  std::vector<const ExchangeInfo*> chosen;
  for (const ExchangeInfo* exchange : among_equals()) {
    if (!exchange->adds_trits && !exchange->between_machines) chosen.push_back(exchange);
  }
  return chosen;
}

class LargestValues : public testing::TestWithParam<const ExchangeInfo*> {};

INSTANTIATE_TEST_SUITE_P(All, LargestValues, testing::ValuesIn(with_residuals()),
                         [](const auto& exchange) { return std::string(exchange.param->name); });

TEST_P(LargestValues, ASumWithAResidualThatOverflowsIsNamedAndNothingIsDamaged) {
  for (const char* codec : {"3lc", "3lc:bucket=320", "3lc:residual=bf16"}) {
    const MakeExchange make = [&](const std::shared_ptr<const Layout>& layout, uint32_t rank) {
      return make_exchange(GetParam()->name, layout, rank, Execution::create().value(), {}).value();
    };
    Cluster cluster(make, kRanks, codec);
    const auto take_step = [&](uint64_t step, float at_77) {
      Buckets buckets = random_buckets(kRanks, cluster.numel(), step);
      buckets[kBad][77] = at_77;
      if (step == 0) {
        for (uint64_t i = 0; i < 8; ++i) buckets[kBad][i] = 3.4e38f;  // so that 77 is owed
      }
      EXPECT_TRUE(cluster.step(buckets, step).ok()) << codec;
      return buckets;
    };
    EXPECT_TRUE(std::isfinite(take_step(0, 1.6e38f)[0][77])) << codec;
    const std::vector<ResidualPiece> before = cluster.rank(kBad).export_residuals();

    const Buckets spoilt = take_step(1, 3e38f);
    for (uint32_t r = 0; r < kRanks; ++r) {
      ASSERT_TRUE(std::isnan(spoilt[r][77])) << codec;
      const auto& origin = cluster.rank(r).non_finite();
      ASSERT_TRUE(origin.has_value()) << codec;
      EXPECT_EQ(origin->rank, kBad) << codec;
      EXPECT_EQ(origin->tensor, "a.weight") << codec;
      EXPECT_EQ(origin->element, 77u) << codec;
    }
    const std::vector<ResidualPiece> after = cluster.rank(kBad).export_residuals();
    ASSERT_EQ(after.size(), before.size());
    for (size_t k = 0; k < before.size(); ++k) {
      for (size_t i = 0; i < before[k].values.size(); ++i) {
        const float was = before[k].values[i];
        ASSERT_NEAR(after[k].values[i], was, 0.1f + std::fabs(was) / 64) << codec << " " << i;
      }
    }
    // A gradient that fits goes through again, and nothing is NaN.
    const Buckets next = take_step(2, -1.6e38f);
    for (const float value : next[0]) ASSERT_TRUE(std::isfinite(value)) << codec;
    EXPECT_FALSE(cluster.rank(0).non_finite().has_value()) << codec;
  }
}

TEST_P(LargestValues, ASumOverTheRanksThatOverflowsIsTheSameOnEveryRank) {
  const MakeExchange make = [&](const std::shared_ptr<const Layout>& layout, uint32_t rank) {
    return make_exchange(GetParam()->name, layout, rank, Execution::create().value(), {}).value();
  };
  Cluster cluster(make, kRanks, "3lc");
  for (const uint64_t step : {0, 1, 2}) {
    Buckets buckets = random_buckets(kRanks, cluster.numel(), step);
    for (auto& bucket : buckets) bucket[77] = step == 1 ? 3.3e38f : bucket[77];
    ASSERT_TRUE(cluster.step(buckets, step).ok());
    for (uint32_t r = 0; r < kRanks; ++r) {
      EXPECT_EQ(std::isfinite(buckets[r][77]), step != 1) << step;
      EXPECT_TRUE(same_bits(buckets[r], buckets[0])) << step;
      const auto& origin = cluster.rank(r).non_finite();
      EXPECT_EQ(origin.has_value(), step == 1 && GetParam()->has_owners) << step;
      EXPECT_EQ(origin ? origin->element : 77u, 77u);
      if (step == 1) {  // as a gradient scaler does, so that what is owed does not overflow again
        cluster.rank(r).retract();
        cluster.rank(r).scale_residuals(0.125f);
      }
      for (const ResidualPiece& piece : cluster.rank(r).export_residuals()) {
        for (const float value : piece.values) ASSERT_TRUE(std::isfinite(value)) << step;
      }
    }
  }
}

}  // namespace
}  // namespace gradwire
