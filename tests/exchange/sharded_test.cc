#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "gtest/gtest.h"

#include "engines/loopback/loopback.h"
#include "gradwire/exchange.h"

namespace gradwire {
namespace {

using Buckets = std::vector<std::vector<float>>;

// All ranks of one exchange in this process.
class Cluster {
 public:
  Cluster(uint32_t world, const std::string& codec,
          std::vector<TensorInfo> tensors = {
              {"a.weight", {64, 64, 3}}, {"a.bias", {64}}, {"b.weight", {100, 47}}}) {
    LayoutOptions options;
    options.codec = codec;
    layout_ =
        std::make_shared<const Layout>(Layout::create(std::move(tensors), world, options).value());
    for (uint32_t rank = 0; rank < world; ++rank) {
      ranks_.push_back(ShardedExchange::create(layout_, rank, Execution::create().value()).value());
    }
  }

  uint64_t numel() const { return layout_->numel(); }
  const Layout& layout() const { return *layout_; }
  ShardedExchange& rank(uint32_t r) { return *ranks_[r]; }
  uint32_t world() const { return static_cast<uint32_t>(ranks_.size()); }

  Status step(Buckets& buckets, uint64_t step, const LoopbackOptions& options = {}) {
    std::vector<Exchange*> exchanges;
    std::vector<std::span<float>> spans;
    for (uint32_t r = 0; r < world(); ++r) {
      exchanges.push_back(ranks_[r].get());
      spans.emplace_back(buckets[r]);
    }
    return run_loopback_step(exchanges, spans, step, options);
  }

  // Mean of the push residuals plus the pull residual, per value of the bucket.
  std::vector<double> owed() {
    std::vector<uint64_t> starts;
    for (const TensorInfo& tensor : layout_->tensors()) {
      starts.push_back(starts.empty() ? 0 : starts.back() + previous_);
      previous_ = tensor.numel();
    }
    std::vector<double> sum(numel());
    for (uint32_t r = 0; r < world(); ++r) {
      for (const ResidualPiece& piece : ranks_[r]->export_residuals()) {
        uint64_t at = piece.offset;
        for (size_t t = 0; t < layout_->tensors().size(); ++t) {
          if (layout_->tensors()[t].name == piece.tensor) at += starts[t];
        }
        const double weight = piece.role == RuleScope::kPush ? 1.0 / world() : 1.0;
        for (size_t i = 0; i < piece.values.size(); ++i) sum[at + i] += weight * piece.values[i];
      }
    }
    return sum;
  }

 private:
  std::shared_ptr<const Layout> layout_;
  std::vector<std::unique_ptr<ShardedExchange>> ranks_;
  uint64_t previous_ = 0;
};

Buckets random_buckets(uint32_t world, uint64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Buckets buckets(world, std::vector<float>(n));
  for (auto& bucket : buckets) {
    for (float& value : bucket) value = normal(random);
  }
  return buckets;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

TEST(Sharded, AllRanksEndWithTheSameBitsAndNothingIsLost) {
  for (uint32_t world : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 12u, 16u, 24u, 32u}) {
    for (const char* codec : {"raw", "bf16", "3lc", "3lc:s=1.75"}) {
      Cluster cluster(world, codec);
      std::vector<double> in(cluster.numel());
      std::vector<double> out(cluster.numel());
      for (uint64_t step = 0; step < 3; ++step) {
        Buckets buckets = random_buckets(world, cluster.numel(), step);
        for (const auto& bucket : buckets) {
          for (uint64_t i = 0; i < bucket.size(); ++i) in[i] += double{bucket[i]} / world;
        }
        const Status status = cluster.step(buckets, step, {.seed = step, .delivery = {}});
        ASSERT_TRUE(status.ok()) << status.message();
        for (uint32_t r = 1; r < world; ++r) ASSERT_TRUE(same_bits(buckets[r], buckets[0]));
        for (uint64_t i = 0; i < out.size(); ++i) out[i] += buckets[0][i];
      }
      const std::vector<double> owed = cluster.owed();
      const double tolerance = std::string(codec) == "bf16" ? 0.05 : 1e-5;
      for (uint64_t i = 0; i < in.size(); ++i) {
        ASSERT_NEAR(out[i] + owed[i], in[i], tolerance) << world << " " << codec;
      }
    }
  }
}

TEST(Sharded, ResultDoesNotDependOnTheOrderOfArrival) {
  Buckets first;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Cluster cluster(5, "3lc");
    Buckets buckets = random_buckets(5, cluster.numel(), 1);
    ASSERT_TRUE(cluster.step(buckets, 0, {.seed = seed, .delivery = {}}).ok());
    if (first.empty()) first = buckets;
    EXPECT_TRUE(same_bits(first[0], buckets[0]));
  }
}

TEST(Sharded, WorksOnAnyLength) {
  for (uint64_t n : {0, 1, 4, 100, 4097, 50001}) {
    Cluster cluster(3, "3lc", {{"only", {n, 1}}});
    Buckets buckets = random_buckets(3, n, n);
    ASSERT_TRUE(cluster.step(buckets, 0).ok()) << n;
    EXPECT_TRUE(same_bits(buckets[0], buckets[2]));
  }
}

// The formula beside the class: (N - 1) / N * n * b / 8 bytes each way, plus headers.
TEST(Sharded, CountsTheBytesThatItSays) {
  Cluster cluster(4, "raw", {{"only", {40960, 4}}});
  Buckets buckets = random_buckets(4, cluster.numel(), 1);
  ASSERT_TRUE(cluster.step(buckets, 0).ok());
  for (uint32_t r = 0; r < 4; ++r) {
    const ExchangeStats& stats = cluster.rank(r).stats();
    const uint64_t each_way = 3 * cluster.numel() / 4 * sizeof(float);
    const uint64_t headers = 3 * (32 + 8 + 1 + 3 + 3);
    EXPECT_EQ(stats.push_bytes_sent, each_way + headers);
    EXPECT_EQ(stats.pull_bytes_sent, each_way + headers);
    EXPECT_EQ(stats.push_bytes_received, each_way + headers);
    EXPECT_EQ(stats.pull_bytes_received, each_way + headers);
    EXPECT_EQ(stats.values_pushed, 3 * cluster.numel() / 4);
    EXPECT_EQ(stats.values_pulled, cluster.numel() / 4);
  }
}

TEST(Sharded, LostAndRepeatedMessagesAreErrors) {
  for (uint64_t victim = 0; victim < 12; ++victim) {
    for (Delivery delivery : {Delivery::kLost, Delivery::kTwice}) {
      Cluster cluster(3, "3lc");
      Buckets buckets = random_buckets(3, cluster.numel(), 1);
      const Status status = cluster.step(
          buckets, 0, {.seed = victim, .delivery = [&](uint32_t, uint32_t, uint64_t index) {
                         return index == victim ? delivery : Delivery::kOnce;
                       }});
      EXPECT_FALSE(status.ok()) << victim;
      EXPECT_NE(status.message().find("rank "), std::string::npos) << status.message();
    }
  }
}

TEST(Sharded, PeersThatDifferAreNamed) {
  Cluster a(2, "3lc:s=1.5");
  Cluster b(2, "3lc:s=1.75");
  EXPECT_TRUE(a.rank(0).check_peer(1, a.rank(1).describe()).ok());
  const Status status = a.rank(0).check_peer(1, b.rank(1).describe());
  EXPECT_EQ(status.code(), StatusCode::kPeerMismatch);
  for (const char* part : {"rank 0", "rank 1", "3lc:s=1.5", "3lc:s=1.75"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  // And a message that slips through is refused.
  std::vector<float> bucket_a(a.numel(), 1.0f);
  std::vector<float> bucket_b(b.numel(), 1.0f);
  ASSERT_TRUE(a.rank(0).start(bucket_a, 0).ok());
  ASSERT_TRUE(b.rank(1).start(bucket_b, 0).ok());
  for (const OutgoingMessage& message : b.rank(1).take_outgoing()) {
    EXPECT_EQ(a.rank(0).receive(1, message.bytes).code(), StatusCode::kPeerMismatch);
  }
}

TEST(Sharded, AStepThatIsNotFiniteIsNanEverywhereAndNoResidualIsLost) {
  for (float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Cluster cluster(3, "3lc:s=1.75");
    Buckets good = random_buckets(3, cluster.numel(), 1);
    std::vector<double> in(cluster.numel());
    for (const auto& bucket : good) {
      for (uint64_t i = 0; i < in.size(); ++i) in[i] += double{bucket[i]} / 3;
    }
    ASSERT_TRUE(cluster.step(good, 0).ok());
    const std::vector<ResidualPiece> before = cluster.rank(1).export_residuals();

    Buckets poisoned = random_buckets(3, cluster.numel(), 2);
    const Buckets inputs = poisoned;
    poisoned[1][12300] = bad;  // tensor a.bias, element 12
    ASSERT_TRUE(cluster.step(poisoned, 1).ok());
    for (uint32_t r = 0; r < 3; ++r) {
      for (float value : poisoned[r]) ASSERT_TRUE(std::isnan(value));
      const auto& origin = cluster.rank(r).non_finite();
      ASSERT_TRUE(origin.has_value());
      EXPECT_EQ(origin->rank, 1u);
      EXPECT_EQ(origin->tensor, "a.bias");
      EXPECT_EQ(origin->element, 12u);
    }
    // The rank whose input was bad is as it was; the others owe again what nobody applied.
    const std::vector<ResidualPiece> after = cluster.rank(1).export_residuals();
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(same_bits(after[i].values, before[i].values));
    for (uint32_t r = 0; r < 3; ++r) cluster.rank(r).retract();
    std::vector<double> owed = cluster.owed();
    for (const Segment& segment : cluster.layout().segments()) {
      if (segment.push_codec->residual_type() == ResidualType::kNone) continue;
      for (uint64_t i = segment.bucket_offset; i < segment.bucket_offset + segment.n; ++i) {
        double expected = in[i] - good[0][i];
        for (uint32_t r : {0u, 2u}) {
          // The owner's own part of a skipped step is not encoded, so there is nothing to keep.
          if (segment.owner != r) expected += double{inputs[r][i]} / 3;
        }
        ASSERT_NEAR(owed[i], expected, 1e-5) << i;
      }
    }
    // And the next step goes on.
    Buckets next = random_buckets(3, cluster.numel(), 3);
    ASSERT_TRUE(cluster.step(next, 2).ok());
    EXPECT_FALSE(cluster.rank(0).non_finite().has_value());
    EXPECT_TRUE(std::isfinite(next[0][0]));
  }
}

TEST(Sharded, ARawLayoutPassesNonFiniteValuesOn) {
  Cluster cluster(2, "raw");
  Buckets buckets = random_buckets(2, cluster.numel(), 1);
  buckets[0][5] = std::numeric_limits<float>::infinity();
  ASSERT_TRUE(cluster.step(buckets, 0).ok());
  EXPECT_TRUE(std::isinf(buckets[1][5]));
  EXPECT_TRUE(std::isfinite(buckets[1][6]));
}

TEST(Sharded, ResidualsSurviveAnotherWorldSize) {
  for (uint32_t new_world : {1u, 2u, 3u, 4u, 7u}) {
    Cluster old(4, "3lc");
    for (uint64_t step = 0; step < 3; ++step) {
      Buckets buckets = random_buckets(4, old.numel(), step);
      ASSERT_TRUE(old.step(buckets, step).ok());
    }
    // Each new rank takes the mean of the old pushes, and one of them each pull piece.
    Cluster now(new_world, "3lc");
    for (uint32_t r = 0; r < 4; ++r) {
      for (ResidualPiece piece : old.rank(r).export_residuals()) {
        if (piece.role == RuleScope::kPull) {
          ASSERT_TRUE(now.rank(0).import_residual(piece).ok());
          continue;
        }
        for (float& value : piece.values) value /= 4;
        for (uint32_t k = 0; k < new_world; ++k) {
          ASSERT_TRUE(now.rank(k).import_residual(piece).ok());
        }
      }
    }
    const std::vector<double> before = old.owed();
    const std::vector<double> after = now.owed();
    for (uint64_t i = 0; i < before.size(); ++i) ASSERT_NEAR(after[i], before[i], 1e-5);
    if (new_world > 1) continue;
    // A lone rank owes nothing after its next step.
    Buckets buckets = random_buckets(1, now.numel(), 9);
    const std::vector<float> input = buckets[0];
    ASSERT_TRUE(now.step(buckets, 0).ok());
    for (uint64_t i = 0; i < before.size(); ++i) {
      ASSERT_NEAR(buckets[0][i], input[i] + before[i], 1e-5);
    }
    EXPECT_TRUE(now.rank(0).export_residuals().empty());
  }
}

// Another bucket of the same step may be the one that is not finite: then this one's result is
// finite, but nobody applies it.
TEST(Sharded, AFiniteResultThatNobodyAppliedIsOwedOnce) {
  for (uint32_t world : {2u, 3u, 5u}) {
    Cluster cluster(world, "3lc:s=1.75");
    std::vector<double> in(cluster.numel());
    for (uint64_t step = 0; step < 3; ++step) {
      Buckets buckets = random_buckets(world, cluster.numel(), step);
      for (const auto& bucket : buckets) {
        for (uint64_t i = 0; i < in.size(); ++i) in[i] += double{bucket[i]} / world;
      }
      ASSERT_TRUE(cluster.step(buckets, step).ok());
      for (uint32_t r = 0; r < world; ++r) cluster.rank(r).retract();
    }
    const std::vector<double> owed = cluster.owed();
    for (const Segment& segment : cluster.layout().segments()) {
      if (segment.push_codec->residual_type() == ResidualType::kNone) continue;
      for (uint64_t i = segment.bucket_offset; i < segment.bucket_offset + segment.n; ++i) {
        ASSERT_NEAR(owed[i], in[i], 1e-5) << world;
      }
    }
  }
}

TEST(Sharded, RefusesAResidualWithoutAPlace) {
  Cluster cluster(2, "3lc");
  EXPECT_EQ(cluster.rank(0)
                .import_residual({RuleScope::kPush, "unknown", 0, std::vector<float>(1)})
                .code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(cluster.rank(0)
                .import_residual({RuleScope::kPush, "a.bias", 64, std::vector<float>(1)})
                .code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace gradwire
