// TernGrad's exchange: shared scales, and sums of trits that are not quantized again.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "gtest/gtest.h"

#include "frame/packet.h"
#include "stages/levels/levels.h"
#include "tests/exchange/terngrad_ranks.h"

namespace gradwire {
namespace {

struct Sent {
  uint32_t source;
  uint32_t target;
  std::vector<std::byte> bytes;
};

// Runs a step in which all messages of a round come before those of the next, and records them.
std::vector<Sent> run_recorded(Cluster& cluster, Buckets& buckets, uint64_t step = 0) {
  std::vector<Sent> sent;
  for (uint32_t r = 0; r < cluster.world(); ++r) {
    EXPECT_TRUE(cluster.rank(r).start(buckets[r], step).ok());
  }
  for (size_t delivered = 0;;) {
    for (uint32_t r = 0; r < cluster.world(); ++r) {
      for (const OutgoingMessage& message : cluster.rank(r).take_outgoing()) {
        sent.push_back({r, message.peer, {message.bytes.begin(), message.bytes.end()}});
      }
    }
    if (delivered == sent.size()) return sent;
    for (const size_t end = sent.size(); delivered < end; ++delivered) {
      const Sent& message = sent[delivered];
      const Status status = cluster.rank(message.target).receive(message.source, message.bytes);
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }
}

std::vector<float> decoded(const PacketFrame& frame) {
  std::vector<float> values(frame.n);
  Execution execution = Execution::create().value();
  EXPECT_TRUE(Codec::from_wire(frame.codec)
                  .value()
                  ->decode(frame.payload, values, DecodeMode::kStore, execution)
                  .ok());
  return values;
}

float first_float(const PacketFrame& frame) {
  float value = 0;
  std::memcpy(&value, frame.payload.data(), sizeof value);
  return value;
}

constexpr uint32_t kWorlds[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 32};

TEST(TernGradExchange, AllRanksEndWithTheSameBitsWithinTheScale) {
  const char* codecs[] = {"terngrad", "terngrad:pack=trits5,bucket=640",
                          "terngrad:clip=0,pack=trits5,coder=rice",
                          "terngrad:clip=1,pack=trits5,coder=zre"};
  for (uint32_t world : kWorlds) {
    Cluster cluster(terngrad(), world, codecs[world % 4]);
    for (uint64_t step = 0; step < 2; ++step) {
      Buckets buckets = uneven_buckets(world, cluster.numel(), step);
      float largest = 0;
      for (const auto& bucket : buckets) {
        for (float value : bucket) largest = std::max(largest, std::fabs(value));
      }
      const Status status = cluster.step(buckets, step, {.seed = step, .delivery = {}});
      ASSERT_TRUE(status.ok()) << world << " " << status.message();
      for (uint32_t r = 1; r < world; ++r) ASSERT_TRUE(same_bits(buckets[r], buckets[0])) << world;
      for (float value : buckets[0]) ASSERT_LE(std::fabs(value), largest * 1.0001f);
    }
  }
}

// The test decodes and adds the pushes. The difference to the pulled sum must be the owner's own
// trit.
TEST(TernGradExchange, PullsTheExactSumsOfTheTrits) {
  constexpr uint32_t kWorld = 5;
  for (const char* codec : {"terngrad", "terngrad:pack=trits5"}) {
    Cluster cluster(terngrad(), kWorld, codec, {{"only", {kWorld * 8000, 1}}});
    Buckets buckets = uneven_buckets(kWorld, cluster.numel(), 3);
    const Buckets inputs = buckets;
    // The sum of the pushes to each owner, in units of the scale, and the frames of the sums.
    std::map<uint64_t, std::vector<int>> sums;
    std::map<uint64_t, std::vector<std::byte>> pulls;
    std::map<uint64_t, float> scales;
    for (const Sent& message : run_recorded(cluster, buckets)) {
      const Packet packet = parse_packet(message.bytes).value();
      const uint64_t shard = packet.header.layout_digest;
      const PacketFrame& frame = packet.frames.at(0);
      if (packet.header.direction == Direction::kPull) {
        EXPECT_EQ(pulls.emplace(shard, message.bytes).first->second, message.bytes);
      } else if (Codec::from_wire(frame.codec).value()->info().name == "terngrad") {
        // Any decoder can read the push, and all pushes of a shard have the same scale.
        EXPECT_EQ(scales.emplace(shard, first_float(frame)).first->second, first_float(frame));
        const std::vector<float> values = decoded(frame);
        sums[shard].resize(values.size());
        for (size_t i = 0; i < values.size(); ++i) {
          sums[shard][i] += static_cast<int>(std::lround(values[i] / scales[shard]));
        }
      }
    }
    EXPECT_EQ(sums.size(), kWorld);
    ASSERT_EQ(pulls.size(), kWorld);
    std::vector<float> result;
    std::vector<bool> seen(2 * kWorld + 1);
    for (const Segment& segment : cluster.layout().segments()) {
      // Each owner's packet holds one segment; the packet's source names the owner.
      const auto pull = std::find_if(pulls.begin(), pulls.end(), [&](const auto& entry) {
        return parse_packet(entry.second).value().header.source == segment.owner;
      });
      ASSERT_NE(pull, pulls.end());
      const Packet packet = parse_packet(pull->second).value();
      EXPECT_EQ(packet.frames[0].codec.id, 24) << "qsgd";
      EXPECT_EQ(packet.frames[0].codec.param_a, kWorld) << "levels, in equal bits";
      const float unit = first_float(packet.frames[0]);
      EXPECT_EQ(unit, level_unit(scales[pull->first], kWorld));
      const std::vector<float> values = decoded(packet.frames[0]);
      for (size_t i = 0; i < values.size(); ++i) {
        const int sum = static_cast<int>(std::lround(values[i] / unit));
        ASSERT_EQ(static_cast<float>(sum) * unit, values[i]);
        seen.at(static_cast<size_t>(sum + static_cast<int>(kWorld))) = true;
        // The owner's own trit is 0 or has the sign of its value.
        const int own = sum - sums[pull->first][i];
        const float value = inputs[segment.owner][segment.bucket_offset + i];
        ASSERT_TRUE(own == 0 || (own == 1 && value > 0) || (own == -1 && value < 0)) << own;
      }
      result.insert(result.end(), values.begin(), values.end());
    }
    EXPECT_TRUE(same_bits(result, buckets[0]));
    EXPECT_GE(std::count(seen.begin(), seen.end(), true), 2 * static_cast<int>(kWorld) - 1);
  }
}

TEST(TernGradExchange, EqualTernaryInputsAreExact) {
  for (uint32_t world : {2u, 4u, 8u}) {
    Cluster cluster(terngrad(), world, "terngrad:clip=0", {{"only", {20000, 1}}});
    Buckets buckets = random_buckets(1, cluster.numel(), 1);
    for (float& value : buckets[0]) value = value > 0.5f ? 0.3f : value < -0.5f ? -0.3f : 0.0f;
    buckets.resize(world, buckets[0]);
    const std::vector<float> input = buckets[0];
    ASSERT_TRUE(cluster.step(buckets, 0).ok());
    EXPECT_TRUE(same_bits(buckets[0], input)) << world;
  }
}

TEST(TernGradExchange, CountsTheBytesThatItSays) {
  struct Case {
    const char* codec;
    uint64_t trits_per_byte;
  };
  for (const Case& c : {Case{"terngrad", 4}, Case{"terngrad:pack=trits5", 5}}) {
    for (uint32_t world : {2u, 4u, 8u}) {
      Cluster cluster(terngrad(), world, c.codec, {{"only", {world * 40960, 1}}});
      Buckets buckets = random_buckets(world, cluster.numel(), 1);
      ASSERT_TRUE(cluster.step(buckets, 0).ok());
      const uint64_t others = world - 1;
      const uint64_t entry = 32 + 8 + 1 + 3 + 3;  // headers of a packet with one large frame
      int width = 0;
      while ((1u << width) < 2 * world + 1) ++width;
      for (uint32_t r = 0; r < world; ++r) {
        const ExchangeStats& stats = cluster.rank(r).stats();
        const uint64_t scales = others * (32 + 8 + 1 + 1 + 1 + 4 * world);
        EXPECT_EQ(stats.scale_bytes_sent, scales);
        const uint64_t push = others * (entry - (40960 / c.trits_per_byte + 4 < 16384 ? 1 : 0) + 4 +
                                        40960 / c.trits_per_byte);
        EXPECT_EQ(stats.push_bytes_sent, scales + push) << c.codec << " " << world;
        EXPECT_EQ(stats.pull_bytes_sent,
                  others * (entry + 4 + 40960 / 8 * static_cast<uint64_t>(width)) -
                      (40960 / 8 * static_cast<uint64_t>(width) + 4 < 16384 ? others : 0))
            << c.codec << " " << world;
        EXPECT_EQ(stats.push_bytes_received, stats.push_bytes_sent);
        EXPECT_EQ(stats.pull_bytes_received, stats.pull_bytes_sent);
        EXPECT_EQ(stats.values_pushed, others * 40960);
        EXPECT_EQ(stats.values_pulled, 40960u);
      }
    }
  }
}

TEST(TernGradExchange, SumsMayBeEntropyCoded) {
  const LayoutOptions options = {.codec = "terngrad:bucket=640",
                                 .pull_codec = "qsgd:levels=4,bucket=320,coder=elias-dense"};
  Cluster coded(terngrad(), 4, options, small_tensors());
  Cluster fixed(terngrad(), 4, "terngrad:bucket=640");
  Buckets buckets = random_buckets(4, coded.numel(), 1);
  Buckets same = buckets;
  ASSERT_TRUE(coded.step(buckets, 0).ok());
  ASSERT_TRUE(fixed.step(same, 0).ok());
  EXPECT_TRUE(same_bits(buckets[0], same[0])) << "the draws are the same";
  EXPECT_LT(coded.rank(0).stats().pull_bytes_sent, fixed.rank(0).stats().pull_bytes_sent);
}

TEST(TernGradExchange, ResultDoesNotDependOnTheOrderOfArrival) {
  Buckets first;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Cluster cluster(terngrad(), 5, "terngrad");
    Buckets buckets = random_buckets(5, cluster.numel(), 1);
    ASSERT_TRUE(cluster.step(buckets, 0, {.seed = seed, .delivery = {}}).ok());
    if (first.empty()) first = buckets;
    EXPECT_TRUE(same_bits(first[0], buckets[4]));
  }
}

TEST(TernGradExchange, LostAndRepeatedMessagesAreErrors) {
  for (uint64_t victim = 0; victim < 18; ++victim) {
    for (Delivery delivery : {Delivery::kLost, Delivery::kTwice}) {
      Cluster cluster(terngrad(), 3, "terngrad");
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

TEST(TernGradExchange, PeersThatDifferAreNamed) {
  Cluster a(terngrad(), 2, "terngrad:clip=2");
  Cluster b(terngrad(), 2, "terngrad:clip=3");
  EXPECT_TRUE(a.rank(0).check_peer(1, a.rank(1).describe()).ok());
  const Status status = a.rank(0).check_peer(1, b.rank(1).describe());
  EXPECT_EQ(status.code(), StatusCode::kPeerMismatch);
  for (const char* part : {"rank 0", "rank 1", "terngrad:clip=2", "terngrad:clip=3"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  std::vector<float> bucket_a(a.numel(), 1.0f);
  std::vector<float> bucket_b(b.numel(), 1.0f);
  ASSERT_TRUE(a.rank(0).start(bucket_a, 0).ok());
  ASSERT_TRUE(b.rank(1).start(bucket_b, 0).ok());
  for (const OutgoingMessage& message : b.rank(1).take_outgoing()) {
    EXPECT_EQ(a.rank(0).receive(1, message.bytes).code(), StatusCode::kPeerMismatch);
  }
}

TEST(TernGradExchange, AStepThatIsNotFiniteIsNanEverywhereAndNamed) {
  for (const char* codec : {"terngrad", "raw"}) {
    for (float bad :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      Cluster cluster(terngrad(), 3, codec);
      Buckets buckets = random_buckets(3, cluster.numel(), 2);
      buckets[2][5] = bad;
      buckets[1][12300] = bad;  // tensor a.bias, element 12, which goes raw
      ASSERT_TRUE(cluster.step(buckets, 0).ok());
      for (uint32_t r = 0; r < 3; ++r) {
        for (float value : buckets[r]) ASSERT_TRUE(std::isnan(value));
        const auto& origin = cluster.rank(r).non_finite();
        ASSERT_TRUE(origin.has_value());
        EXPECT_EQ(origin->rank, 1u) << "the lowest";
        EXPECT_EQ(origin->tensor, "a.bias");
        EXPECT_EQ(origin->element, 12u);
        EXPECT_EQ(cluster.rank(r).stats().non_finite_steps, 1u);
        EXPECT_EQ(cluster.rank(r).stats().pull_bytes_sent, 0u);
        EXPECT_FALSE(cluster.rank(r).keeps_residuals());
      }
      buckets = random_buckets(3, cluster.numel(), 3);
      ASSERT_TRUE(cluster.step(buckets, 1).ok());
      EXPECT_FALSE(cluster.rank(0).non_finite().has_value());
      EXPECT_TRUE(std::isfinite(buckets[0][0]));
    }
  }
}

TEST(TernGradExchange, RefusesAPushWithOtherScales) {
  Cluster cluster(terngrad(), 2, "terngrad", {{"only", {10000, 2}}});
  Cluster other(terngrad(), 2, "terngrad", {{"only", {10000, 2}}});
  Buckets buckets(2, std::vector<float>(cluster.numel(), 1.0f));
  Buckets larger(2, std::vector<float>(cluster.numel(), 2.0f));
  const std::vector<Sent> sent = run_recorded(other, larger);
  ASSERT_TRUE(cluster.rank(0).start(buckets[0], 0).ok());
  ASSERT_TRUE(cluster.rank(1).start(buckets[1], 0).ok());
  const auto scales = cluster.rank(1).take_outgoing();
  ASSERT_TRUE(cluster.rank(0).receive(1, scales.at(0).bytes).ok());
  const auto push = std::find_if(sent.begin() + 2, sent.end(),
                                 [](const Sent& message) { return message.source == 1; });
  const Status status = cluster.rank(0).receive(1, push->bytes);
  EXPECT_EQ(status.code(), StatusCode::kPeerMismatch);
  EXPECT_EQ(status.message(), "rank 1 pushed tensor 'only' with other scales than were shared");
}

// Values of the magnitude of the scale leave nothing to chance: each rank's trits are known.
TEST(TernGradExchange, AddsTheTritsOfManyRanksExactly) {
  const std::vector<TensorInfo> tensors = {{"only", {40, 40}}};
  struct Way {
    uint32_t world;
    const char* codec;
    std::string pull;
    double bits;  // of a pulled value; 0: not known
  };
  for (const Way& way :
       {Way{127, "terngrad:clip=0", "", 8}, Way{128, "terngrad:clip=0", "", 9},
        Way{200, "terngrad:clip=0,pack=trits5,coder=rice", "", 9},
        Way{200, "terngrad:clip=0,bucket=320", "qsgd:levels=200,bucket=320,coder=elias", 0},
        Way{512, "terngrad:clip=0,pack=trits5", "", 11}}) {
    SCOPED_TRACE(std::to_string(way.world) + " " + way.codec);
    Cluster cluster(terngrad(), way.world,
                    LayoutOptions{.codec = way.codec, .pull_codec = way.pull}, tensors);
    const auto trit = [](uint32_t rank, uint64_t i) -> int {
      // The first values sum up to N, -N, 0 and N / 2.
      const int first[] = {1, -1, rank % 2 == 0 ? 1 : -1, rank % 2 == 0 ? 1 : 0};
      return i < 4 ? first[i] : static_cast<int>((rank * 7 + i * (rank % 5)) % 3) - 1;
    };
    Buckets buckets(way.world, std::vector<float>(cluster.numel()));
    std::vector<int> sums(cluster.numel());
    for (uint32_t r = 0; r < way.world; ++r) {
      for (uint64_t i = 0; i < sums.size(); ++i) {
        sums[i] += trit(r, i);
        buckets[r][i] = 0.75f * static_cast<float>(trit(r, i));
      }
    }
    ASSERT_TRUE(cluster.step(buckets, 0, {.seed = way.world, .delivery = {}}).ok());
    ASSERT_EQ(sums[0], static_cast<int>(way.world));
    const double unit = 0.75 / way.world;
    for (uint64_t i = 0; i < sums.size(); ++i) {
      ASSERT_NEAR(buckets[0][i] / unit, sums[i], 1e-3) << i;
    }
    for (const auto& bucket : buckets) ASSERT_TRUE(same_bits(bucket, buckets[0]));
    uint64_t pulled = 0;
    for (uint32_t r = 0; r < way.world; ++r) {
      pulled = std::max(pulled, cluster.rank(r).stats().pull_bytes_encoded);
    }
    if (way.bits > 0) {
      EXPECT_NEAR(static_cast<double>(pulled), way.bits * 1600 / 8, 80);
    }
  }
}

TEST(TernGradExchange, ATensorHasOneScaleHoweverManyOwnersItHas) {
  // Only the first half has the largest value and the wide spread. With 2.5 standard deviations of
  // its own, the second half would be clipped to a hundredth.
  for (const char* codec : {"terngrad:clip=0", "terngrad"}) {
    std::vector<double> smallest;  // magnitudes that are not 0: sums of 1
    for (uint32_t world : {2u, 4u}) {
      Cluster cluster(terngrad(), world, codec, {{"only", {4, 8000}}, {"other", {64, 64}}});
      uint64_t pieces = 0;
      for (const Segment& segment : cluster.layout().segments()) pieces += segment.tensor == 0;
      ASSERT_EQ(pieces, world);
      std::vector<float> input = random_buckets(1, cluster.numel(), 5)[0];
      for (uint64_t i = 16000; i < 32000; ++i) input[i] *= 0.01f;
      Buckets buckets(world, input);
      ASSERT_TRUE(cluster.step(buckets, 0).ok());
      for (uint64_t begin : {0u, 16000u}) {
        float least = std::numeric_limits<float>::max();
        for (uint64_t i = begin; i < begin + 16000; ++i) {
          if (buckets[0][i] != 0) least = std::min(least, std::abs(buckets[0][i]));
        }
        smallest.push_back(double{least} * world);
      }
    }
    for (double scale : smallest) EXPECT_NEAR(scale / smallest[0], 1, 1e-6) << codec;
  }
}

TEST(TernGradExchange, RefusesLayoutsThatItCannotWorkWith) {
  const auto refused = [](uint32_t world, const LayoutOptions& options) {
    const auto layout =
        std::make_shared<const Layout>(Layout::create(small_tensors(), world, options).value());
    const auto made = make_exchange("terngrad", layout, 0, Execution::create().value());
    EXPECT_EQ(made.status().code(), StatusCode::kInvalidArgument);
    return made.status().message();
  };
  EXPECT_EQ(refused(8192, {.codec = "terngrad"}),
            "exchange terngrad: at most 8191 ranks, as qsgd has so many levels for their sums; the "
            "layout has 8192");
  EXPECT_NE(refused(2, {.codec = "qsgd:ef=on"}).find("no residual is kept"), std::string::npos);
  EXPECT_NE(refused(2, {.codec = "3lc"}).find("no residual is kept"), std::string::npos);
  for (const char* pull : {"raw", "qsgd:levels=3", "qsgd:levels=2,bucket=648"}) {
    EXPECT_NE(refused(2, {.codec = "terngrad:bucket=640", .pull_codec = pull}).find("levels=2"),
              std::string::npos)
        << pull;
  }
  const auto most = std::make_shared<const Layout>(
      Layout::create(small_tensors(), 8191, {.codec = "terngrad"}).value());
  EXPECT_TRUE(make_exchange("terngrad", most, 8190, Execution::create().value()).ok());
}

TEST(TernGradExchange, SpeaksBetweenMachines) {
  const std::vector<uint32_t> machines = {0, 0, 1, 1, 2, 2};
  const auto layout = std::make_shared<const Layout>(
      Layout::create(small_tensors(), 3, {.codec = "terngrad"}).value());
  std::vector<std::unique_ptr<Exchange>> ranks;
  std::vector<Exchange*> exchanges;
  for (uint32_t rank = 0; rank < 6; ++rank) {
    ranks.push_back(make_exchange("hierarchical:between=terngrad", layout, rank,
                                  Execution::create().value(), {.machine_of_rank = machines})
                        .value());
    exchanges.push_back(ranks.back().get());
  }
  for (bool finite : {true, false}) {
    Buckets buckets = random_buckets(6, layout->numel(), 1);
    if (!finite) buckets[3][5] = std::numeric_limits<float>::infinity();
    const std::vector<std::span<float>> spans(buckets.begin(), buckets.end());
    ASSERT_TRUE(run_loopback_step(exchanges, spans, 0).ok());
    for (uint32_t rank = 0; rank < 6; ++rank) {
      EXPECT_EQ(ranks[rank]->non_finite().has_value(), !finite) << rank;
      EXPECT_TRUE(!finite || same_bits(buckets[rank], buckets[0]));
    }
  }
}

}  // namespace
}  // namespace gradwire
