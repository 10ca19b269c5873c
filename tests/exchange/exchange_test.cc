// Properties that all averaging exchanges share, and properties of single exchanges.

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "gtest/gtest.h"

#include "frame/packet.h"
#include "tests/exchange/cluster.h"

namespace gradwire {
namespace {

MakeExchange makes(std::string_view name, ExchangeOptions options = {}) {
  return [=](const std::shared_ptr<const Layout>& layout, uint32_t rank) {
    return make_exchange(name, layout, rank, Execution::create().value(), options).value();
  };
}

class Exchanges : public testing::TestWithParam<const ExchangeInfo*> {
 protected:
  Cluster make_cluster(uint32_t world, const std::string& codec,
                       std::vector<TensorInfo> tensors = small_tensors()) const {
    return {makes(GetParam()->name), world, codec, std::move(tensors)};
  }
};

// Whether `rank` encodes its part of `owner`'s shard in a step of 3 ranks in which `bad` is not
// finite. Only then does the skipped step leave something in a residual.
bool encodes(const ExchangeInfo& exchange, uint32_t owner, uint32_t rank, uint32_t bad) {
  if (!exchange.has_owners) return rank != bad;
  const auto hop = [&](uint32_t r) { return (r + 2 - owner) % 3; };
  return rank != owner && (!exchange.encodes_sums_on_the_way || hop(rank) < hop(bad));
}

// The exchanges that keep residuals, without those that hand the work to another exchange.
std::vector<const ExchangeInfo*> with_residuals() {
  std::vector<const ExchangeInfo*> chosen;
  for (const ExchangeInfo* exchange : among_equals()) {
    if (!exchange->adds_trits && !exchange->between_machines) chosen.push_back(exchange);
  }
  return chosen;
}

INSTANTIATE_TEST_SUITE_P(All, Exchanges, testing::ValuesIn(with_residuals()),
                         [](const auto& exchange) { return std::string(exchange.param->name); });

TEST_P(Exchanges, AllRanksEndWithTheSameBitsAndNothingIsLost) {
  for (uint32_t world : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 12u, 16u, 24u, 32u}) {
    for (const char* codec : {"raw", "bf16", "3lc", "3lc:s=1.75"}) {
      Cluster cluster = make_cluster(world, codec);
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
      // Each rank rounds float32 sums in proportion to the residuals. bf16 loses its rounding at
      // each hop for good.
      double largest = 1;
      for (double value : owed) largest = std::max(largest, std::abs(value));
      const double tolerance = std::string(codec) == "bf16" ? 0.05 : 2e-6 * (4 + world) * largest;
      for (uint64_t i = 0; i < in.size(); ++i) {
        ASSERT_NEAR(out[i] + owed[i], in[i], tolerance) << world << " " << codec;
      }
    }
  }
}

TEST_P(Exchanges, ResultDoesNotDependOnTheOrderOfArrival) {
  Buckets first;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Cluster cluster = make_cluster(5, "3lc");
    Buckets buckets = random_buckets(5, cluster.numel(), 1);
    ASSERT_TRUE(cluster.step(buckets, 0, {.seed = seed, .delivery = {}}).ok());
    if (first.empty()) first = buckets;
    EXPECT_TRUE(same_bits(first[0], buckets[0]));
  }
}

TEST_P(Exchanges, WorksOnAnyLength) {
  for (uint64_t n : {0, 1, 4, 100, 4097, 50001}) {
    Cluster cluster = make_cluster(3, "3lc", {{"only", {n, 1}}});
    Buckets buckets = random_buckets(3, n, n);
    ASSERT_TRUE(cluster.step(buckets, 0).ok()) << n;
    EXPECT_TRUE(same_bits(buckets[0], buckets[2]));
  }
}

// The formulas of exchange.h: (N - 1) / N * n * b / 8 bytes each way, plus headers; without owners
// (N - 1) * n * b / 8 bytes, and no pulls.
TEST_P(Exchanges, CountsTheBytesThatItSays) {
  Cluster cluster = make_cluster(4, "raw", {{"only", {40960, 4}}});
  Buckets buckets = random_buckets(4, cluster.numel(), 1);
  ASSERT_TRUE(cluster.step(buckets, 0).ok());
  const bool owners = GetParam()->has_owners;
  for (uint32_t r = 0; r < 4; ++r) {
    const ExchangeStats& stats = cluster.rank(r).stats();
    const uint64_t shard = cluster.numel() / (owners ? 4 : 1);
    const uint64_t each_way = 3 * shard * sizeof(float);
    const uint64_t headers = 3 * (32 + 8 + 1 + 3 + 3);
    EXPECT_EQ(stats.push_bytes_sent, each_way + headers);
    EXPECT_EQ(stats.push_bytes_received, each_way + headers);
    EXPECT_EQ(stats.values_pushed, 3 * shard);
    EXPECT_EQ(stats.pull_bytes_sent, owners ? each_way + headers : 0);
    EXPECT_EQ(stats.pull_bytes_received, owners ? each_way + headers : 0);
    EXPECT_EQ(stats.values_pulled, owners ? shard : 0);
  }
}

// Counters of what is compressed leave out raw tensors: here a vector of large values.
std::vector<TensorInfo> matrix_and_vector() { return {{"matrix", {128, 128}}, {"vector", {128}}}; }

TEST_P(Exchanges, CountsPayloadsOfCompressedTensorsAlone) {
  Cluster cluster = make_cluster(2, "bf16", matrix_and_vector());
  Buckets buckets = random_buckets(2, cluster.numel(), 1);
  ASSERT_TRUE(cluster.step(buckets, 0).ok());
  uint64_t pushed = 0;
  for (uint32_t r = 0; r < 2; ++r) {
    const ExchangeStats& stats = cluster.rank(r).stats();
    EXPECT_EQ(stats.push_payload_bytes, 2 * stats.values_pushed_compressed);
    EXPECT_EQ(stats.pull_payload_bytes, 2 * stats.values_pulled_compressed);
    EXPECT_EQ(stats.values_pushed_compressed + stats.values_pulled_compressed, 128u * 128u);
    pushed += stats.values_pushed_compressed;
    const std::vector<TensorTraffic> tensors = cluster.rank(r).tensor_traffic();
    ASSERT_EQ(tensors.size(), 2u);
    EXPECT_EQ(tensors[0].values_pushed, stats.values_pushed_compressed);
    EXPECT_EQ(tensors[0].push_payload_bytes, stats.push_payload_bytes);
    EXPECT_EQ(tensors[0].values_pulled, stats.values_pulled_compressed);
    EXPECT_EQ(tensors[0].pull_payload_bytes, stats.pull_payload_bytes);
    EXPECT_EQ(tensors[0].values_pushed + tensors[1].values_pushed, stats.values_pushed);
    EXPECT_EQ(tensors[1].push_payload_bytes, 4 * tensors[1].values_pushed);
    EXPECT_EQ(tensors[1].pull_payload_bytes, 4 * tensors[1].values_pulled);
    EXPECT_EQ(tensors[1].values_pushed + tensors[1].values_pulled, 128u);
  }
  EXPECT_EQ(pushed, (GetParam()->has_owners ? 1u : 2u) * 128u * 128u);
}

TEST_P(Exchanges, SamplesTheErrorOfCompressedTensorsOnceResidualsHaveGrown) {
  constexpr uint64_t kSample = 16;
  Cluster cluster = make_cluster(2, "3lc", matrix_and_vector());
  Buckets inputs;
  for (uint64_t step = 1; step <= kSample; ++step) {
    EXPECT_EQ(cluster.rank(0).stats().error_norm_samples, 0u);
    inputs = random_buckets(2, cluster.numel(), step);
    for (auto& input : inputs) {
      for (uint64_t i = uint64_t{128} * 128; i < input.size(); ++i) input[i] *= 1000;
    }
    Buckets buckets = inputs;
    ASSERT_TRUE(cluster.step(buckets, step).ok());
  }
  for (uint32_t r = 0; r < 2; ++r) {
    double error = 0;
    double input = 0;
    for (const ResidualPiece& piece : cluster.rank(r).export_residuals()) {
      if (piece.direction != Direction::kPush) continue;
      ASSERT_EQ(piece.tensor, "matrix");
      for (size_t i = 0; i < piece.values.size(); ++i) {
        error += double{piece.values[i]} * piece.values[i];
        input += double{inputs[r][piece.offset + i]} * inputs[r][piece.offset + i];
      }
    }
    EXPECT_EQ(cluster.rank(r).stats().error_norm_samples, 1u);
    EXPECT_NEAR(cluster.rank(r).stats().error_norm_sum, std::sqrt(error / input), 1e-5);
  }
}

TEST_P(Exchanges, LostAndRepeatedMessagesAreErrors) {
  // 6 pushes, and as many pulls.
  for (uint64_t victim = 0; victim < (GetParam()->has_owners ? 12 : 6); ++victim) {
    for (Delivery delivery : {Delivery::kLost, Delivery::kTwice}) {
      Cluster cluster = make_cluster(3, "3lc");
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

TEST_P(Exchanges, PeersThatDifferAreNamed) {
  Cluster a = make_cluster(2, "3lc:s=1.5");
  Cluster b = make_cluster(2, "3lc:s=1.75");
  EXPECT_TRUE(a.rank(0).check_peer(1, a.rank(1).describe()).ok());
  const Status status = a.rank(0).check_peer(1, b.rank(1).describe());
  EXPECT_EQ(status.code(), StatusCode::kPeerMismatch);
  for (const char* part : {"rank 0", "rank 1", "3lc:s=1.5", "3lc:s=1.75"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  // If the ranks go on all the same, the first message is refused.
  std::vector<float> bucket_a(a.numel(), 1.0f);
  std::vector<float> bucket_b(b.numel(), 1.0f);
  ASSERT_TRUE(a.rank(0).start(bucket_a, 0).ok());
  ASSERT_TRUE(b.rank(1).start(bucket_b, 0).ok());
  for (const OutgoingMessage& message : b.rank(1).take_outgoing()) {
    EXPECT_EQ(a.rank(0).receive(1, message.bytes).code(), StatusCode::kPeerMismatch);
  }
}

TEST_P(Exchanges, AStepThatIsNotFiniteIsNanEverywhereAndNoResidualIsLost) {
  for (float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Cluster cluster = make_cluster(3, "3lc:s=1.75");
    Buckets good = random_buckets(3, cluster.numel(), 1);
    std::vector<double> in(cluster.numel());
    for (const auto& bucket : good) {
      for (uint64_t i = 0; i < in.size(); ++i) in[i] += double{bucket[i]} / 3;
    }
    ASSERT_TRUE(cluster.step(good, 0).ok());
    const std::vector<ResidualPiece> before = cluster.rank(1).export_residuals();

    Buckets spoilt = random_buckets(3, cluster.numel(), 2);
    const Buckets inputs = spoilt;
    spoilt[1][12300] = bad;  // tensor a.bias, element 12
    ASSERT_TRUE(cluster.step(spoilt, 1).ok());
    for (uint32_t r = 0; r < 3; ++r) {
      for (float value : spoilt[r]) ASSERT_TRUE(std::isnan(value));
      const auto& origin = cluster.rank(r).non_finite();
      ASSERT_TRUE(origin.has_value());
      EXPECT_EQ(origin->rank, 1u);
      EXPECT_EQ(origin->tensor, "a.bias");
      EXPECT_EQ(origin->element, 12u);
    }
    // The rank with the bad input has its old residuals; those of the others hold the values that
    // nobody applied.
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
          if (encodes(*GetParam(), segment.owner, r, 1)) expected += double{inputs[r][i]} / 3;
        }
        ASSERT_NEAR(owed[i], expected, 1e-5) << i;
      }
    }
    // The next step works again.
    Buckets next = random_buckets(3, cluster.numel(), 3);
    ASSERT_TRUE(cluster.step(next, 2).ok());
    EXPECT_FALSE(cluster.rank(0).non_finite().has_value());
    EXPECT_TRUE(std::isfinite(next[0][0]));
  }
}

TEST_P(Exchanges, ACodecWithoutResidualsNamesTheElementToo) {
  Cluster cluster = make_cluster(3, "int8:ef=off");
  Buckets buckets = random_buckets(3, cluster.numel(), 1);
  buckets[1][7] = std::numeric_limits<float>::infinity();
  ASSERT_TRUE(cluster.step(buckets, 0).ok());
  for (uint32_t r = 0; r < 3; ++r) {
    ASSERT_TRUE(cluster.rank(r).non_finite().has_value());
    EXPECT_EQ(cluster.rank(r).non_finite()->rank, 1u);
    EXPECT_EQ(cluster.rank(r).non_finite()->element, 7u);
  }
}

TEST_P(Exchanges, ARawLayoutPassesNonFiniteValuesOn) {
  Cluster cluster = make_cluster(2, "raw");
  Buckets buckets = random_buckets(2, cluster.numel(), 1);
  buckets[0][5] = std::numeric_limits<float>::infinity();
  ASSERT_TRUE(cluster.step(buckets, 0).ok());
  EXPECT_TRUE(std::isinf(buckets[1][5]));
  EXPECT_TRUE(std::isfinite(buckets[1][6]));
}

TEST_P(Exchanges, ResidualsSurviveAnotherWorldSize) {
  for (uint32_t new_world : {1u, 2u, 3u, 4u, 7u}) {
    Cluster old = make_cluster(4, "3lc");
    for (uint64_t step = 0; step < 3; ++step) {
      Buckets buckets = random_buckets(4, old.numel(), step);
      ASSERT_TRUE(old.step(buckets, step).ok());
    }
    // Each new rank takes the mean of the old push residuals, and one rank takes each pull
    // residual.
    Cluster now = make_cluster(new_world, "3lc");
    for (uint32_t r = 0; r < 4; ++r) {
      for (ResidualPiece piece : old.rank(r).export_residuals()) {
        if (piece.direction == Direction::kPull) {
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
    // A lone rank has no residual left after its next step.
    Buckets buckets = random_buckets(1, now.numel(), 9);
    const std::vector<float> input = buckets[0];
    ASSERT_TRUE(now.step(buckets, 0).ok());
    for (uint64_t i = 0; i < before.size(); ++i) {
      ASSERT_NEAR(buckets[0][i], input[i] + before[i], 1e-5);
    }
    EXPECT_TRUE(now.rank(0).export_residuals().empty());
  }
}

// If another bucket of the same step is not finite, this bucket's result is finite, but nobody
// applies it.
TEST_P(Exchanges, AFiniteResultThatNobodyAppliedIsOwedOnce) {
  for (uint32_t world : {2u, 3u, 5u}) {
    Cluster cluster = make_cluster(world, "3lc:s=1.75");
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

// Owes far more than it gets, and sends a thousandth of it in a step.
TEST_P(Exchanges, NamesResidualsThatOutgrewTheirInputs) {
  Cluster cluster = make_cluster(3, "topk:ratio=0.001");
  const auto take_steps = [&](uint64_t first, uint64_t last, float scale) {
    for (uint64_t step = first; step < last; ++step) {
      Buckets buckets = random_buckets(3, cluster.numel(), step);
      for (auto& bucket : buckets) {
        for (float& value : bucket) value *= scale;
      }
      ASSERT_TRUE(cluster.step(buckets, step).ok());
    }
  };
  take_steps(0, 100, 1.0f);
  take_steps(100, 200, 0.001f);  // smaller gradients than before are no reason
  for (uint32_t r = 0; r < 3; ++r) EXPECT_EQ(cluster.rank(r).stats().outgrown_residuals, 0u);
  const std::vector<float> owed(64 * 64 * 3, 1e6f);
  ASSERT_TRUE(cluster.rank(0).import_residual({Direction::kPush, "a.weight", 0, owed}).ok());
  take_steps(200, 207, 1.0f);
  EXPECT_TRUE(cluster.rank(0).outgrown_residuals().empty()) << "every 16th step is examined";
  take_steps(207, 250, 1.0f);
  const std::vector<OutgrownResidual> found = cluster.rank(0).outgrown_residuals();
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found.size(), cluster.rank(0).stats().outgrown_residuals);
  std::set<Direction> directions;
  for (const OutgrownResidual& one : found) {
    EXPECT_TRUE(directions.insert(one.direction).second) << "named twice";
    EXPECT_EQ(one.tensor, "a.weight");
    EXPECT_EQ(one.step, 207u);
    EXPECT_GT(one.factor, 1e5);
    EXPECT_LT(one.factor, 1e7);
  }
  EXPECT_TRUE(cluster.rank(1).outgrown_residuals().empty());
}

// onebit owes more than 32 times a constant input. bfloat16 loses some of that, float32 does not.
TEST_P(Exchanges, NamesResidualsThatAreTooLargeForBfloat16) {
  for (const char* codec : {"onebit", "onebit:residual=bf16"}) {
    Cluster cluster = make_cluster(2, codec);
    const Buckets constant = random_buckets(2, cluster.numel(), 1);
    for (uint64_t step = 0; step < 400; ++step) {
      Buckets buckets = constant;
      for (auto& bucket : buckets) bucket[0] = 30.0f;  // an outlier is owed for long
      ASSERT_TRUE(cluster.step(buckets, step).ok());
    }
    const std::vector<OutgrownResidual> found = cluster.rank(1).outgrown_residuals();
    EXPECT_EQ(found.empty(), std::string(codec) == "onebit") << codec;
    for (const OutgrownResidual& one : found) {
      EXPECT_EQ(one.type, ResidualType::kBfloat16);
      EXPECT_GT(one.factor, 32);
      EXPECT_LT(one.factor, kMostInputs);
    }
  }
}

TEST_P(Exchanges, RefusesAResidualWithoutAPlace) {
  Cluster cluster = make_cluster(2, "3lc");
  EXPECT_EQ(cluster.rank(0)
                .import_residual({Direction::kPush, "unknown", 0, std::vector<float>(1)})
                .code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(cluster.rank(0)
                .import_residual({Direction::kPush, "a.bias", 64, std::vector<float>(1)})
                .code(),
            StatusCode::kInvalidArgument);
}

// A message of a recorded step.
struct Sent {
  uint32_t source;
  uint32_t target;
  std::vector<std::byte> bytes;
};

std::vector<Sent> run_recorded(Cluster& cluster, Buckets& buckets) {
  std::vector<Sent> sent;
  for (uint32_t r = 0; r < cluster.world(); ++r) {
    EXPECT_TRUE(cluster.rank(r).start(buckets[r], 0).ok());
  }
  for (bool any = true; any;) {
    any = false;
    for (uint32_t r = 0; r < cluster.world(); ++r) {
      for (const OutgoingMessage& message : cluster.rank(r).take_outgoing()) {
        any = true;
        sent.push_back({r, message.peer, {message.bytes.begin(), message.bytes.end()}});
        EXPECT_TRUE(cluster.rank(message.peer).receive(r, sent.back().bytes).ok());
      }
    }
  }
  return sent;
}

// The loopback engine refuses longer messages in all other tests, with every codec.
TEST_P(Exchanges, NoMessageIsLongerThanItsLimit) {
  Cluster cluster = make_cluster(3, "raw");
  Buckets buckets = random_buckets(3, cluster.numel(), 1);
  size_t longest = 0;
  for (const Sent& message : run_recorded(cluster, buckets)) {
    longest = std::max(longest, message.bytes.size());
  }
  Exchange& rank = cluster.rank(1);
  const uint64_t limit = rank.max_message_size();
  EXPECT_LE(longest, limit);
  EXPECT_LT(limit, longest + 64);  // with an entry for each segment's codec
  EXPECT_TRUE(rank.check_size(2, limit).ok());
  const Status status = rank.check_size(2, limit + 1);
  EXPECT_EQ(status.code(), StatusCode::kLimitExceeded);
  EXPECT_EQ(status.message(), "rank 2 sends rank 1 a message of " + std::to_string(limit + 1) +
                                  " bytes; no message of this exchange has more than " +
                                  std::to_string(limit));
}

TEST(Ring, NeighboursAloneTalkAndAveragesArePassedOnAsTheyAre) {
  Cluster cluster(makes("ring"), 5, "3lc");
  Buckets buckets = random_buckets(5, cluster.numel(), 1);
  std::map<uint64_t, std::vector<std::vector<std::byte>>> pulls;  // key: the shard's digest
  std::map<uint64_t, int> pushes;
  for (const Sent& message : run_recorded(cluster, buckets)) {
    EXPECT_EQ(message.target, (message.source + 1) % 5);
    const Packet packet = parse_packet(message.bytes).value();
    if (packet.header.direction == Direction::kPush) {
      ++pushes[packet.header.layout_digest];
    } else {
      pulls[packet.header.layout_digest].push_back(message.bytes);
    }
  }
  EXPECT_EQ(pulls.size(), 5u);
  for (const auto& [digest, hops] : pulls) {
    EXPECT_EQ(pushes[digest], 4);
    ASSERT_EQ(hops.size(), 4u);
    for (const auto& bytes : hops) EXPECT_EQ(bytes, hops[0]);
  }
}

TEST(Ring, QuantizesSumsAndTheShardedExchangeEachPart) {
  // The formula of exchange.h: N / 2 times the variance of the sum's error.
  constexpr uint32_t kWorld = 16;
  constexpr int kSteps = 8;
  double error[2] = {};
  for (int kind = 0; kind < 2; ++kind) {
    for (int step = 0; step < kSteps; ++step) {
      // Pulls go raw, so that only the pushes add an error.
      LayoutOptions options{.codec = "int8:ef=off", .pull_codec = "raw"};
      Cluster cluster(makes(kind == 0 ? "sharded" : "ring"), kWorld, options,
                      {{"only", {kWorld, 4096}}});
      Buckets buckets = random_buckets(kWorld, cluster.numel(), static_cast<uint64_t>(step));
      std::vector<double> mean(cluster.numel());
      for (const auto& bucket : buckets) {
        for (size_t i = 0; i < mean.size(); ++i) mean[i] += double{bucket[i]} / kWorld;
      }
      ASSERT_TRUE(cluster.step(buckets, 0).ok());
      for (size_t i = 0; i < mean.size(); ++i) {
        const double difference = buckets[0][i] - mean[i];
        error[kind] += difference * difference;
      }
    }
  }
  EXPECT_NEAR(error[1] / error[0], kWorld / 2.0, kWorld / 10.0);
}

// The comparison of exchange.h: N / 2 times the bytes of the sharded exchange, plus headers.
TEST(Broadcast, SendsMoreThanTheShardedExchangeFromThreeRanksOn) {
  for (uint32_t world : {2u, 3u, 4u, 8u}) {
    uint64_t sent[2] = {};
    uint64_t received[2] = {};
    for (int kind = 0; kind < 2; ++kind) {
      Cluster cluster(makes(kind == 0 ? "sharded" : "broadcast"), world, "qsgd:bits=4",
                      {{"only", {world, 40960}}});
      Buckets buckets = random_buckets(world, cluster.numel(), 1);
      ASSERT_TRUE(cluster.step(buckets, 0).ok());
      const ExchangeStats& stats = cluster.rank(world - 1).stats();
      sent[kind] = stats.push_bytes_sent + stats.pull_bytes_sent;
      received[kind] = stats.push_bytes_received + stats.pull_bytes_received;
    }
    EXPECT_EQ(sent[0], received[0]);
    EXPECT_EQ(sent[1], received[1]);
    const double ratio = static_cast<double>(sent[1]) / static_cast<double>(sent[0]);
    EXPECT_NEAR(ratio, world / 2.0, 0.005 * world) << world;
    EXPECT_EQ(sent[1] > sent[0], world >= 3) << world;
  }
}

TEST(Broadcast, SendsAllOthersTheSamePacketOnce) {
  Cluster cluster(makes("broadcast"), 5, "qsgd");
  Buckets buckets = random_buckets(5, cluster.numel(), 1);
  std::map<uint32_t, std::vector<Sent>> by_source;
  for (Sent& message : run_recorded(cluster, buckets)) {
    by_source[message.source].push_back(std::move(message));
  }
  ASSERT_EQ(by_source.size(), 5u);
  for (const auto& [source, messages] : by_source) {
    std::set<uint32_t> targets;
    for (const Sent& message : messages) {
      EXPECT_EQ(message.bytes, messages[0].bytes);
      targets.insert(message.target);
    }
    EXPECT_EQ(targets.size(), 4u);
    EXPECT_EQ(messages.size(), 4u);
    // Tensors are whole, although their owners in the layout are several ranks.
    EXPECT_EQ(parse_packet(messages[0].bytes).value().frames.size(), small_tensors().size());
  }
  EXPECT_GT(cluster.layout().segments().size(), small_tensors().size());
}

// The comparison of exchange.h. Of sharded pushes, one of N is the owner's own and exact.
TEST(Broadcast, HasTheErrorOfOneEncodingDividedByTheRanks) {
  constexpr uint32_t kWorld = 8;
  double error[2] = {};
  for (int kind = 0; kind < 2; ++kind) {
    for (uint64_t step = 0; step < 4; ++step) {
      const std::vector<TensorInfo> tensors = {{"only", {kWorld, 4096}}};
      Cluster cluster(makes(kind == 0 ? "broadcast" : "sharded"), kWorld, "qsgd", tensors);
      Buckets buckets = random_buckets(kWorld, cluster.numel(), step);
      std::vector<double> mean(cluster.numel());
      for (const auto& bucket : buckets) {
        for (size_t i = 0; i < mean.size(); ++i) mean[i] += double{bucket[i]} / kWorld;
      }
      ASSERT_TRUE(cluster.step(buckets, step).ok());
      for (size_t i = 0; i < mean.size(); ++i) {
        error[kind] += (buckets[0][i] - mean[i]) * (buckets[0][i] - mean[i]);
      }
    }
    error[kind] /= 4.0 * kWorld * 4096;
  }
  // A draw between levels that are `unit` apart has the variance unit^2 / 6 on average; the largest
  // of 512 normal values is about 3.1. The mean's values are smaller by the root of N.
  const double unit = 3.1 / 7;
  const double once = unit * unit / 6;
  EXPECT_NEAR(error[0], once / kWorld, 0.15 * once / kWorld);
  EXPECT_NEAR(error[1], (kWorld - 1) * once / kWorld / kWorld + once / kWorld, 0.3 * once / kWorld);
}

TEST(Broadcast, TakesOneCodecForEachTensor) {
  LayoutOptions options{.codec = "qsgd", .pull_codec = "bf16"};
  const auto layout =
      std::make_shared<const Layout>(Layout::create(small_tensors(), 3, options).value());
  const Status status = make_exchange("broadcast", layout, 0, Execution::create().value()).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "exchange broadcast has no pulls, so a tensor takes one codec: 'a.weight' has qsgd for "
            "pushes and bf16 for pulls; leave the codec of pulls out, and the direction of rules");
}

TEST(Broadcast, OfSeveralBadRanksAllReportTheLowest) {
  Cluster cluster(makes("broadcast"), 4, "3lc");
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Buckets buckets = random_buckets(4, cluster.numel(), seed);
    buckets[3][0] = buckets[1][12300] = std::numeric_limits<float>::quiet_NaN();
    ASSERT_TRUE(cluster.step(buckets, seed, {.seed = seed, .delivery = {}}).ok());
    for (uint32_t r = 0; r < 4; ++r) {
      ASSERT_TRUE(cluster.rank(r).non_finite().has_value());
      EXPECT_EQ(cluster.rank(r).non_finite()->rank, 1u) << seed;
      EXPECT_EQ(cluster.rank(r).non_finite()->tensor, "a.bias");
    }
  }
}

TEST(Sharded, EveryoneGetsWhatTheOwnersUpdateMakesOfTheAverage) {
  constexpr uint32_t kWorld = 3;
  std::vector<int> calls(kWorld);
  Status verdict;
  const MakeExchange make = [&](const std::shared_ptr<const Layout>& layout, uint32_t rank) {
    const ShardUpdate update = [&calls, &verdict, layout, rank](std::span<float> bucket) {
      ++calls[rank];
      for (const Segment& segment : layout->segments()) {
        if (segment.owner != rank) continue;
        for (float& value : bucket.subspan(segment.bucket_offset, segment.n)) value *= -0.5f;
      }
      return verdict;
    };
    return make_exchange("sharded", layout, rank, Execution::create().value(), {.update = update})
        .value();
  };
  Cluster cluster(make, kWorld, "raw");
  Buckets buckets = random_buckets(kWorld, cluster.numel(), 1);
  const Buckets inputs = buckets;
  ASSERT_TRUE(cluster.step(buckets, 0).ok());
  EXPECT_EQ(calls, std::vector<int>(kWorld, 1));
  for (uint64_t i = 0; i < cluster.numel(); ++i) {
    const float mean = (inputs[0][i] + inputs[1][i] + inputs[2][i]) / 3;
    ASSERT_NEAR(buckets[0][i], -0.5f * mean, 1e-6);
  }
  EXPECT_TRUE(same_bits(buckets[0], buckets[2]));

  // If the update fails, so does the step.
  verdict = {StatusCode::kInvalidArgument, "no step today"};
  EXPECT_EQ(cluster.step(buckets, 1).message(), "no step today");

  // A step that is not finite is not updated.
  Cluster marked(make, kWorld, "3lc");
  calls.assign(kWorld, 0);
  buckets[1][0] = std::numeric_limits<float>::infinity();
  ASSERT_TRUE(marked.step(buckets, 0).ok());
  EXPECT_EQ(calls, std::vector<int>(kWorld, 0));
}

TEST_P(Exchanges, GiveTheSumWhereThatIsWanted) {
  const MakeExchange make = makes(GetParam()->name, {.reduction = Reduction::kSum});
  Cluster cluster(make, 3, "raw");
  Buckets buckets(3, std::vector<float>(cluster.numel(), 0.1f));
  ASSERT_TRUE(cluster.step(buckets, 0).ok());
  for (float value : buckets[1]) ASSERT_EQ(value, 0.1f + 0.1f + 0.1f);
  // Ranks that ask for another reduction are refused.
  Cluster average = make_cluster(3, "raw");
  EXPECT_EQ(average.rank(0).check_peer(1, cluster.rank(1).describe()).code(),
            StatusCode::kPeerMismatch);
}

std::vector<TensorInfo> blocks(uint32_t world, uint64_t n) {
  std::vector<TensorInfo> tensors;
  for (uint32_t r = 0; r < world; ++r) tensors.push_back({"block " + std::to_string(r), {n, 1}});
  return tensors;
}

TEST(ReduceScatter, EveryOwnerEndsWithItsBlock) {
  const MakeExchange make = [](const std::shared_ptr<const Layout>& layout, uint32_t rank) {
    return make_reduce_scatter_exchange(layout, rank, Execution::create().value()).value();
  };
  for (uint32_t world : {1u, 2u, 3u, 7u}) {
    Cluster cluster(make, world, "raw", blocks(world, 1000));
    Buckets buckets = random_buckets(world, cluster.numel(), 1);
    const Buckets inputs = buckets;
    ASSERT_TRUE(cluster.step(buckets, 0).ok());
    for (uint32_t r = 0; r < world; ++r) {
      EXPECT_EQ(cluster.rank(r).stats().pull_bytes_sent, 0u);
      for (uint64_t i = r * 1000; i < (r + 1) * 1000; ++i) {
        double mean = 0;
        for (const auto& input : inputs) mean += double{input[i]} / world;
        ASSERT_NEAR(buckets[r][i], mean, 1e-6);
      }
    }
  }
  // A NaN on one rank makes every block NaN, and the values that the others pushed go back into
  // their residuals.
  Cluster cluster(make, 3, "3lc", blocks(3, 1000));
  Buckets buckets = random_buckets(3, cluster.numel(), 1);
  buckets[1][2500] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(cluster.step(buckets, 0).ok());
  for (uint32_t r = 0; r < 3; ++r) {
    ASSERT_TRUE(cluster.rank(r).non_finite().has_value());
    EXPECT_EQ(cluster.rank(r).non_finite()->tensor, "block 2");
    EXPECT_TRUE(std::isnan(buckets[r][r * 1000]));
  }
}

TEST(ReduceScatter, RowsWithPadding) {
  const MakeExchange make = [](const std::shared_ptr<const Layout>& layout, uint32_t rank) {
    return make_reduce_scatter_exchange(layout, rank, Execution::create().value()).value();
  };
  const LayoutOptions options = {.codec = "3lc", .min_numel = 1, .cut = Cut::kRows};
  for (uint32_t world : {1u, 2u, 3u, 7u}) {
    Cluster cluster(make, world, options, {{"a", {5, 300}}, {"b", {11}}, {"c", {64, 8}}});
    std::vector<double> given(cluster.numel());
    std::vector<double> received(cluster.numel());
    for (uint64_t step = 0; step < 30; ++step) {
      Buckets buckets = random_buckets(world, cluster.numel(), step);
      for (const auto& bucket : buckets) {
        for (size_t i = 0; i < bucket.size(); ++i) given[i] += double{bucket[i]} / world;
      }
      ASSERT_TRUE(cluster.step(buckets, step).ok());
      for (const Segment& segment : cluster.layout().segments()) {
        const std::vector<float>& bucket = buckets[segment.owner];
        for (uint64_t k = 0; k < segment.n; ++k) {
          received[segment.bucket_offset + k] += double{bucket[segment.bucket_offset + k]};
        }
      }
    }
    // What was not received is owed, by the rank that has a residual of it.
    std::vector<double> owed(cluster.numel());
    for (uint32_t r = 0; r < world; ++r) {
      for (const ResidualPiece& piece : cluster.rank(r).export_residuals()) {
        for (const Segment& segment : cluster.layout().segments()) {
          if (cluster.layout().tensors()[segment.tensor].name != piece.tensor) continue;
          if (segment.tensor_offset != piece.offset || piece.direction != Direction::kPush)
            continue;
          for (uint64_t k = 0; k < segment.n; ++k) {
            owed[segment.bucket_offset + k] += double{piece.values[k]} / world;
          }
        }
      }
    }
    for (const Segment& segment : cluster.layout().segments()) {
      for (uint64_t k = 0; k < segment.n; ++k) {
        const uint64_t i = segment.bucket_offset + k;
        ASSERT_NEAR(received[i] + owed[i], given[i], 1e-4);
      }
    }
  }
  const auto layout =
      std::make_shared<const Layout>(Layout::create({{"a", {5, 300}}}, 2, options).value());
  for (const char* other : {"broadcast", "hierarchical:ranks=2"}) {
    EXPECT_EQ(make_exchange(other, layout, 0, Execution::create().value()).status().code(),
              StatusCode::kInvalidArgument);
  }
}

TEST(Allgather, EveryoneEndsWithTheBitsThatWereSent) {
  const MakeExchange make = [](const std::shared_ptr<const Layout>& layout, uint32_t rank) {
    return make_allgather_exchange(layout, rank, Execution::create().value()).value();
  };
  for (const char* codec : {"raw", "bf16", "3lc"}) {
    for (uint32_t world : {1u, 2u, 3u, 7u}) {
      Cluster cluster(make, world, codec, blocks(world, 1000));
      Buckets buckets = random_buckets(world, cluster.numel(), 1);
      const Buckets inputs = buckets;
      ASSERT_TRUE(cluster.step(buckets, 0).ok());
      for (uint32_t r = 0; r < world; ++r) {
        EXPECT_EQ(cluster.rank(r).stats().push_bytes_sent, 0u);
        EXPECT_TRUE(same_bits(buckets[r], buckets[0]));
        if (std::string(codec) != "raw") continue;
        for (uint64_t i = r * 1000; i < (r + 1) * 1000; ++i) ASSERT_EQ(buckets[0][i], inputs[r][i]);
      }
    }
  }
}

}  // namespace
}  // namespace gradwire
