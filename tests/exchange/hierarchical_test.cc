#include <algorithm>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"

#include "frame/packet.h"
#include "tests/exchange/cluster.h"

namespace gradwire {
namespace {

// Ranks 0 and 3 share a machine, 1, 2 and 4 share another, and 5 has a third.
const std::vector<uint32_t> kMachines = {7, 2, 2, 7, 2, 0};

class Hierarchy {
 public:
  Hierarchy(const std::string& codec, const char* between,
            Reduction reduction = Reduction::kAverage,
            const std::vector<TensorInfo>& tensors = small_tensors()) {
    layout_ = std::make_shared<const Layout>(
        Layout::create(tensors, 3, LayoutOptions{.codec = codec}).value());
    for (uint32_t rank = 0; rank < kMachines.size(); ++rank) {
      ranks_.push_back(make_exchange(std::string("hierarchical:between=") + between, layout_, rank,
                                     Execution::create().value(),
                                     {.reduction = reduction, .machine_of_rank = kMachines})
                           .value());
    }
  }

  const Layout& layout() const { return *layout_; }
  Exchange& rank(size_t r) { return *ranks_[r]; }

  Status step(Buckets& buckets, uint64_t step, const LoopbackOptions& options = {}) {
    std::vector<Exchange*> exchanges;
    std::vector<std::span<float>> spans;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      exchanges.push_back(ranks_[r].get());
      spans.emplace_back(buckets[r]);
    }
    return run_loopback_step(exchanges, spans, step, options);
  }

 private:
  std::shared_ptr<const Layout> layout_;
  std::vector<std::unique_ptr<Exchange>> ranks_;
};

TEST(Hierarchical, AllRanksEndWithTheSpeakersBitsInAnyOrderOfArrival) {
  for (const char* between : {"sharded", "ring"}) {
    std::vector<float> first;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Hierarchy hierarchy("3lc", between);
      Buckets buckets = random_buckets(6, hierarchy.layout().numel(), 1);
      ASSERT_TRUE(hierarchy.step(buckets, 0, {.seed = seed, .delivery = {}}).ok());
      if (first.empty()) first = buckets[0];
      for (const auto& bucket : buckets) ASSERT_TRUE(same_bits(bucket, first)) << seed;
    }
  }
}

TEST(Hierarchical, AveragesOverRanksNotOverMachines) {
  Hierarchy hierarchy("raw", "sharded");
  Buckets buckets = random_buckets(6, hierarchy.layout().numel(), 1);
  std::vector<double> mean(hierarchy.layout().numel());
  for (const auto& bucket : buckets) {
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += double{bucket[i]} / 6;
  }
  ASSERT_TRUE(hierarchy.step(buckets, 0).ok());
  for (size_t i = 0; i < mean.size(); ++i) ASSERT_NEAR(buckets[4][i], mean[i], 1e-6);
}

TEST(Hierarchical, SumsWholeNumbersExactlyWhereTheSumIsWanted) {
  for (const char* between : {"sharded", "ring"}) {
    Hierarchy hierarchy("raw", between, Reduction::kSum);
    Buckets buckets(6, std::vector<float>(hierarchy.layout().numel()));
    for (size_t rank = 0; rank < 6; ++rank) {
      std::fill(buckets[rank].begin(), buckets[rank].end(), static_cast<float>(rank + 1));
    }
    ASSERT_TRUE(hierarchy.step(buckets, 0).ok());
    for (const auto& bucket : buckets) {
      for (float value : bucket) ASSERT_EQ(value, 21.0f);
    }
  }
}

TEST(Hierarchical, CountsWhatStaysInsideAMachineApart) {
  Hierarchy hierarchy("raw", "sharded");
  Buckets buckets = random_buckets(6, hierarchy.layout().numel(), 1);
  ASSERT_TRUE(hierarchy.step(buckets, 0).ok());
  const double bucket_bytes = static_cast<double>(hierarchy.layout().numel()) * sizeof(float);
  for (uint32_t r : {2u, 3u, 4u}) {
    const ExchangeStats& stats = hierarchy.rank(r).stats();
    EXPECT_EQ(stats.push_bytes_sent + stats.pull_bytes_sent, 0u);
    EXPECT_NEAR(static_cast<double>(stats.local_bytes_sent), bucket_bytes, 64);
  }
  const ExchangeStats& speaker = hierarchy.rank(1).stats();
  EXPECT_NEAR(static_cast<double>(speaker.local_bytes_sent), 2.0 * bucket_bytes, 128);
  EXPECT_NEAR(static_cast<double>(speaker.push_bytes_sent), 2.0 / 3 * bucket_bytes,
              0.1 * bucket_bytes);
  EXPECT_EQ(hierarchy.rank(5).stats().local_bytes_sent, 0u);
}

TEST(Hierarchical, LostAndRepeatedMessagesAreErrors) {
  for (uint64_t victim = 0; victim < 18; ++victim) {
    for (Delivery delivery : {Delivery::kLost, Delivery::kTwice}) {
      Hierarchy hierarchy("3lc", "ring");
      Buckets buckets = random_buckets(6, hierarchy.layout().numel(), 1);
      const Status status = hierarchy.step(
          buckets, 0, {.seed = victim, .delivery = [&](uint32_t, uint32_t, uint64_t index) {
                         return index == victim ? delivery : Delivery::kOnce;
                       }});
      EXPECT_FALSE(status.ok()) << victim;
      EXPECT_NE(status.message().find("rank "), std::string::npos) << status.message();
    }
  }
}

TEST(Hierarchical, AStepThatIsNotFiniteIsSkippedByAll) {
  Hierarchy hierarchy("3lc", "ring");
  Buckets buckets = random_buckets(6, hierarchy.layout().numel(), 1);
  buckets[4][12300] = std::numeric_limits<float>::infinity();  // tensor a.bias, element 12
  ASSERT_TRUE(hierarchy.step(buckets, 0).ok());
  for (uint32_t r = 0; r < 6; ++r) {
    ASSERT_TRUE(hierarchy.rank(r).non_finite().has_value()) << r;
    EXPECT_TRUE(std::isnan(buckets[r][0]));
    EXPECT_TRUE(hierarchy.rank(r).keeps_residuals());
  }
  EXPECT_EQ(hierarchy.rank(0).non_finite()->rank, 1u);  // the speaker of rank 4's machine
  EXPECT_EQ(hierarchy.rank(0).non_finite()->tensor, "a.bias");
  EXPECT_EQ(hierarchy.rank(0).non_finite()->element, 12u);
  buckets = random_buckets(6, hierarchy.layout().numel(), 2);
  ASSERT_TRUE(hierarchy.step(buckets, 1).ok());
  EXPECT_FALSE(hierarchy.rank(3).non_finite().has_value());
}

TEST(Hierarchical, AnEmptyBucketGoesInPacketsWithoutFramesAsInOtherExchanges) {
  const auto layout = std::make_shared<const Layout>(Layout::create({{"a", {0}}}, 2, {}).value());
  for (const auto& [text, ranks] :
       {std::pair<const char*, uint32_t>{"sharded", 2}, {"ring", 2}, {"hierarchical:ranks=2", 4}}) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const auto exchange = make_exchange(text, layout, rank, Execution::create().value()).value();
      ASSERT_TRUE(exchange->start({}, 0).ok());
      for (const OutgoingMessage& message : exchange->take_outgoing()) {
        EXPECT_EQ(parse_packet(message.bytes).value().frames.size(), 0u) << text << rank;
      }
    }
  }
  Hierarchy hierarchy("3lc", "sharded", Reduction::kAverage, {});
  Buckets buckets(kMachines.size());
  EXPECT_TRUE(hierarchy.step(buckets, 0).ok());
}

TEST(Hierarchical, RefusesMachinesThatAreNotTheLayouts) {
  const auto layout =
      std::make_shared<const Layout>(Layout::create(small_tensors(), 2, {}).value());
  EXPECT_EQ(make_exchange("hierarchical:between=ring", layout, 0, Execution::create().value(),
                          {.machine_of_rank = kMachines})
                .status()
                .message(),
            "the layout is for 2 machines, there are 3");
}

}  // namespace
}  // namespace gradwire
