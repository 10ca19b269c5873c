#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

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

TEST(Hierarchical, RanksOfOtherSeedsAreRefusedWhereTheCodecInsideMachinesDraws) {
  const auto layout = std::make_shared<const Layout>(
      Layout::create(small_tensors(), 2, LayoutOptions{.codec = "qsgd"}).value());
  for (const std::string within : {"qsgd", "bf16"}) {
    const auto make = [&](uint32_t rank, uint64_t seed) {
      return make_exchange("hierarchical:ranks=2,within_codec=" + within, layout, rank,
                           Execution::create().value(), {.seed = seed})
          .value();
    };
    const Status other = make(0, 1)->check_peer(2, make(2, 5)->describe());
    EXPECT_EQ(other.code(), within == "qsgd" ? StatusCode::kPeerMismatch : StatusCode::kOk);
    EXPECT_EQ(other.message().find("seed 5") != std::string::npos, within == "qsgd");
    EXPECT_TRUE(make(0, 5)->check_peer(2, make(2, 5)->describe()).ok());
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
    EXPECT_EQ(describe(*hierarchy.rank(r).non_finite(), "the gradient"),
              "the gradient of rank 4 is not finite at element 12 of a.bias");
  }
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

TEST(Hierarchical, RefusesMoreRanksThanAJobCanHave) {
  const auto layout =
      std::make_shared<const Layout>(Layout::create(small_tensors(), 2, {}).value());
  const auto refusal = [&](const std::string& ranks) {
    return make_exchange("hierarchical:ranks=" + ranks, layout, 0, Execution::create().value())
        .status()
        .message();
  };
  for (const char* ranks : {"0", "65536", "4294967295", "4294967296", "many"}) {
    EXPECT_EQ(refusal(ranks), "an exchange's ranks= is '" + std::string(ranks) +
                                  "'; a machine has 1 to 65535 ranks");
  }
  EXPECT_EQ(refusal("32768"),
            "a hierarchical exchange has at most 65535 ranks, got 65536 on 2 machines");
  EXPECT_EQ(refusal("32767"), "");
}

// Rings in groups: `size` consecutive ranks share a machine, of `world` ranks.
class Groups {
 public:
  Groups(const std::string& text, uint32_t world, uint32_t size, const std::string& codec,
         const std::vector<TensorInfo>& tensors = small_tensors())
      : size_(size) {
    const auto layout = std::make_shared<const Layout>(
        Layout::create(tensors, world / size, {.codec = codec}).value());
    for (uint32_t rank = 0; rank < world; ++rank) {
      ranks_.push_back(make_exchange("hierarchical:ranks=" + std::to_string(size) + "," + text,
                                     layout, rank, Execution::create().value())
                           .value());
    }
  }

  uint64_t numel() const { return ranks_[0]->layout().numel(); }
  Exchange& rank(uint32_t r) { return *ranks_[r]; }

  Status step(Buckets& buckets, uint64_t step, uint64_t seed) {
    std::vector<Exchange*> exchanges;
    for (const auto& exchange : ranks_) exchanges.push_back(exchange.get());
    const std::vector<std::span<float>> spans(buckets.begin(), buckets.end());
    const auto note = [&](uint32_t source, uint32_t target, uint64_t) {
      const bool ring = source / size_ == target / size_
                            ? target % size_ == (source + 1) % size_
                            : source % size_ == 0 && target % size_ == 0;
      only_neighbours_talked &= ring;
      return Delivery::kOnce;
    };
    return run_loopback_step(exchanges, spans, step, {.seed = seed, .delivery = note});
  }

  bool only_neighbours_talked = true;

 private:
  uint32_t size_;
  std::vector<std::unique_ptr<Exchange>> ranks_;
};

constexpr const char* kRings = "within=ring,between=ring";

TEST(RingsInGroups, AllRanksEndWithTheSameBitsWithinTheBoundOfBothLegs) {
  struct Codecs {
    const char* within;
    const char* between;
    double error_within;  // of one encoding, of values up to 1
    double error_between;
  };
  // The first two compress one leg alone.
  const std::vector<Codecs> kCodecs = {
      {"bf16", "raw", 0x1p-9, 0},
      {"raw", "bf16", 0, 0x1p-9},
      {"fp16", "bf16", 0x1p-12, 0x1p-9},
      {"inceptionn:mode=strict", "int8:ef=off", 0x1p-10, 1.0 / 254},
      {"qsgd:bits=8", "qsgd:bits=8", 1.0 / 127, 1.0 / 127}};
  for (uint32_t world = 1; world <= 32; ++world) {
    for (uint32_t size = 1; size <= world; ++size) {
      if (world % size != 0) continue;
      const Codecs& codecs = kCodecs[(world + size) % kCodecs.size()];
      SCOPED_TRACE(std::to_string(world) + " ranks in groups of " + std::to_string(size) + ", " +
                   codecs.within + ", " + codecs.between);
      Groups groups(std::string(kRings) + ",within_codec=" + codecs.within, world, size,
                    codecs.between);
      Buckets buckets = random_buckets(world, groups.numel(), world);
      double largest = 0;
      std::vector<double> mean(groups.numel());
      for (auto& bucket : buckets) {
        for (size_t i = 0; i < mean.size(); ++i) {
          bucket[i] /= 8;
          mean[i] += double{bucket[i]} / world;
          largest = std::max(largest, std::abs(double{bucket[i]}));
        }
      }
      ASSERT_LT(largest, 1);
      ASSERT_TRUE(groups.step(buckets, 0, world).ok());
      // A ring of k encodes sums of 1 to k - 1 parts and their average; the mean of them errs by
      // half the number of parts. The result is encoded once more.
      const auto ring = [](double error, uint32_t k) { return k == 1 ? 0 : error * (k + 1) / 2.0; };
      const double bound = 1.02 * (ring(codecs.error_within, size) + codecs.error_within +
                                   ring(codecs.error_between, world / size)) +
                           1e-6;
      for (uint32_t r = 0; r < world; ++r) ASSERT_TRUE(same_bits(buckets[r], buckets[0])) << r;
      for (size_t i = 0; i < mean.size(); ++i) {
        ASSERT_LE(std::abs(buckets[0][i] - mean[i]), bound * largest) << i;
      }
      ASSERT_TRUE(groups.only_neighbours_talked);
    }
  }
}

TEST(RingsInGroups, SendTheBytesOfTheirCodecs) {
  constexpr uint32_t kWorld = 12;
  constexpr uint32_t kSize = 4;
  Groups groups("within=ring,between=ring,within_codec=bf16", kWorld, kSize, "int8:ef=off",
                {{"a", {240, 320}}});
  Buckets buckets = random_buckets(kWorld, groups.numel(), 1);
  ASSERT_TRUE(groups.step(buckets, 0, 1).ok());
  const auto n = static_cast<double>(groups.numel());
  for (uint32_t r = 0; r < kWorld; ++r) {
    const ExchangeStats& stats = groups.rank(r).stats();
    // Two legs of the ring, and the result, which the last rank does not pass on.
    const double result = r % kSize == kSize - 1 ? 0 : 2 * n;
    EXPECT_NEAR(static_cast<double>(stats.local_bytes_sent), 2 * 0.75 * 2 * n + result, 1e-2 * n)
        << r;
    const double between = r % kSize == 0 ? 2 * 2.0 / 3 * n : 0;
    EXPECT_NEAR(static_cast<double>(stats.push_bytes_sent + stats.pull_bytes_sent), between,
                1e-2 * n)
        << r;
  }
}

TEST(RingsInGroups, GroupsDrawApartAndSendTheSameResult) {
  const auto layout = std::make_shared<const Layout>(
      Layout::create({{"a", {128, 128}}}, 2, {.codec = "raw"}).value());
  std::vector<std::unique_ptr<Exchange>> ranks;
  for (uint32_t r = 0; r < 4; ++r) {
    ranks.push_back(make_exchange("hierarchical:within=ring,ranks=2,within_codec=qsgd:bits=4",
                                  layout, r, Execution::create().value())
                        .value());
  }
  Buckets buckets(4, random_buckets(1, 128 * 128, 3)[0]);
  std::map<uint32_t, std::vector<std::vector<std::byte>>> sent;  // by rank, inside its machine
  for (uint32_t r = 0; r < 4; ++r) ASSERT_TRUE(ranks[r]->start(buckets[r], 0).ok());
  for (bool any = true; any;) {
    any = false;
    for (uint32_t r = 0; r < 4; ++r) {
      for (const OutgoingMessage& message : ranks[r]->take_outgoing()) {
        any = true;
        const std::vector<std::byte> bytes(message.bytes.begin(), message.bytes.end());
        if (message.peer / 2 == r / 2) sent[r].push_back(bytes);
        ASSERT_TRUE(ranks[message.peer]->receive(r, bytes).ok());
      }
    }
  }
  ASSERT_EQ(sent[0].size(), sent[2].size());
  EXPECT_NE(sent[0].front(), sent[2].front());
  EXPECT_EQ(sent[0].back(), sent[2].back());
  EXPECT_TRUE(same_bits(buckets[1], buckets[3]));
}

TEST(RingsInGroups, AStepThatIsNotFiniteIsSkippedByAll) {
  for (const char* within : {"raw", "int8:ef=off", "inceptionn"}) {
    Groups groups(std::string(kRings) + ",within_codec=" + within, 6, 3, "3lc");
    for (uint64_t step = 0; step < 2; ++step) {
      Buckets buckets = random_buckets(6, groups.numel(), step);
      if (step == 0) buckets[4][100] = std::numeric_limits<float>::quiet_NaN();
      ASSERT_TRUE(groups.step(buckets, step, step).ok());
      for (uint32_t r = 0; r < 6; ++r) {
        EXPECT_EQ(groups.rank(r).non_finite().has_value(), step == 0) << within << r;
        EXPECT_TRUE(same_bits(buckets[r], buckets[0]));
        EXPECT_EQ(std::isnan(buckets[r][100]), step == 0);
        EXPECT_EQ(groups.rank(r).stats().non_finite_steps, 1u);
      }
    }
  }
}

// Element 12 of a.bias, which lies in the middle of a bucket, of each rank in turn.
TEST(HierarchyOfEveryKind, AllRanksNameTheRankAndTheElementThatIsNotFinite) {
  struct Kind {
    const char* text;
    const char* codec;  // between machines
  };
  for (const Kind& kind : {
           Kind{"between=sharded", "3lc"},
           Kind{"between=ring", "3lc"},
           Kind{"between=broadcast", "topk:ef=on"},
           Kind{"between=sharded,within_codec=bf16", "3lc"},
           Kind{"between=sharded,within_codec=int8:ef=off", "3lc"},
           Kind{"between=terngrad", "terngrad"},
           Kind{kRings, "int8"},
           Kind{"within=ring,within_codec=int8:ef=off", "int8"},
           Kind{"within=ring,within_codec=inceptionn", "int8"},
           Kind{"within=sharded", "3lc"},
           Kind{"within=broadcast,between=ring", "3lc"},
           Kind{"within=terngrad,within_codec=terngrad", "raw"},
           Kind{"within=terngrad,between=terngrad,within_codec=terngrad", "terngrad"},
       }) {
    for (const uint32_t machines : {2u, 3u}) {
      const uint32_t world = 3 * machines;
      Groups groups(kind.text, world, 3, kind.codec);
      for (uint32_t victim = 0; victim < world; ++victim) {
        SCOPED_TRACE(std::string(kind.text) + ", " + kind.codec + " on " +
                     std::to_string(machines) + " machines, rank " + std::to_string(victim));
        Buckets buckets = random_buckets(world, groups.numel(), victim);
        buckets[victim][12300] = std::numeric_limits<float>::quiet_NaN();
        ASSERT_TRUE(groups.step(buckets, victim, victim).ok());
        for (uint32_t r = 0; r < world; ++r) {
          ASSERT_TRUE(groups.rank(r).non_finite().has_value()) << r;
          EXPECT_EQ(describe(*groups.rank(r).non_finite(), "the gradient"),
                    "the gradient of rank " + std::to_string(victim) +
                        " is not finite at element 12 of a.bias");
          EXPECT_EQ(groups.rank(r).stats().non_finite_steps, victim + 1);
          for (const float value : buckets[r]) ASSERT_TRUE(std::isnan(value));
        }
        groups.rank(0).retract();
      }
      Buckets buckets = random_buckets(world, groups.numel(), 1);
      ASSERT_TRUE(groups.step(buckets, world, 1).ok());
      EXPECT_FALSE(groups.rank(0).non_finite().has_value());
    }
  }
}

TEST(HierarchyOfEveryKind, ASumThatOverflowsIsNamedByTheRankThatAdds) {
  Groups groups("between=sharded", 6, 3, "3lc");
  Buckets buckets = random_buckets(6, groups.numel(), 1);
  buckets[4][12300] = buckets[5][12300] = std::numeric_limits<float>::max();
  ASSERT_TRUE(groups.step(buckets, 0, 1).ok());
  for (uint32_t r = 0; r < 6; ++r) {
    ASSERT_TRUE(groups.rank(r).non_finite().has_value()) << r;
    EXPECT_EQ(groups.rank(r).non_finite()->rank, 3u);
    EXPECT_EQ(groups.rank(r).non_finite()->element, 12u);
    EXPECT_EQ(groups.rank(r).stats().non_finite_steps, 1u);
  }
}

TEST(HierarchyOfEveryKind, AStepThatIsNotFiniteIsTakenBackAsWithoutMachines) {
  for (const std::string between : {"sharded", "ring", "broadcast"}) {
    for (uint32_t victim = 0; victim < 3; ++victim) {
      Groups groups("between=" + between, 6, 2, "3lc");
      const auto layout = std::make_shared<const Layout>(
          Layout::create(small_tensors(), 3, {.codec = "3lc"}).value());
      std::vector<std::unique_ptr<Exchange>> plain;
      std::vector<Exchange*> exchanges;
      for (uint32_t r = 0; r < 3; ++r) {
        plain.push_back(make_exchange(between, layout, r, Execution::create().value()).value());
        exchanges.push_back(plain.back().get());
      }
      for (uint64_t step = 0; step < 3; ++step) {
        Buckets buckets = random_buckets(3, groups.numel(), step);
        Buckets of_machines;  // both ranks of a machine have its average
        for (const std::vector<float>& bucket : buckets) {
          of_machines.insert(of_machines.end(), 2, bucket);
        }
        if (step == 1) {
          buckets[victim][12300] = std::numeric_limits<float>::infinity();
          of_machines[2 * victim + 1][12300] = std::numeric_limits<float>::infinity();
        }
        const std::vector<std::span<float>> spans(buckets.begin(), buckets.end());
        ASSERT_TRUE(run_loopback_step(exchanges, spans, step, {.seed = step, .delivery = {}}).ok());
        ASSERT_TRUE(groups.step(of_machines, step, step).ok());
        for (uint32_t r = 0; r < 3; ++r) {
          if (step == 1) {
            ASSERT_EQ(groups.rank(2 * r).non_finite()->rank, 2 * victim + 1);
            plain[r]->retract();
            groups.rank(2 * r).retract();
          }
          const std::vector<ResidualPiece> expected = plain[r]->export_residuals();
          const std::vector<ResidualPiece> found = groups.rank(2 * r).export_residuals();
          ASSERT_EQ(found.size(), expected.size());
          for (size_t k = 0; k < found.size(); ++k) {
            EXPECT_TRUE(same_bits(found[k].values, expected[k].values))
                << between << " rank " << r << " step " << step << " " << found[k].tensor;
          }
        }
      }
    }
  }
}

TEST(HierarchyOfEveryKind, AResultThatTheCodecWithinTurnsIntoInfinityIsFoundByAll) {
  Groups groups("between=sharded,within_codec=fp16", 4, 2, "3lc");
  Buckets buckets(4, std::vector<float>(groups.numel(), 0.0f));
  for (const uint32_t r : {0u, 2u}) buckets[r][77] = 4e5f;  // the speakers'; the average is 2e5
  ASSERT_TRUE(groups.step(buckets, 0, 1).ok());
  for (uint32_t r = 0; r < 4; ++r) {
    ASSERT_TRUE(groups.rank(r).non_finite().has_value()) << r;
    EXPECT_EQ(groups.rank(r).non_finite()->rank, r - r % 2);
    EXPECT_EQ(groups.rank(r).non_finite()->tensor, groups.rank(0).layout().tensors()[0].name);
    EXPECT_EQ(groups.rank(r).non_finite()->element, 77u);
  }
}

TEST(RingsInGroups, TensorsThatGoRawBetweenMachinesGoRawInsideThem) {
  const auto layout =
      std::make_shared<const Layout>(Layout::create({{"a[0]", {64, 64}}, {"b", {64, 64}}}, 2,
                                                    {.codec = "int8:ef=off", .exclude = {"a*"}})
                                         .value());
  std::vector<std::unique_ptr<Exchange>> ranks;
  for (uint32_t r = 0; r < 4; ++r) {
    ranks.push_back(make_exchange("hierarchical:within=ring,ranks=2,within_codec=bf16", layout, r,
                                  Execution::create().value())
                        .value());
  }
  Buckets buckets(4, std::vector<float>(2 * 64 * 64, 1.0f + 0x1p-20f));
  std::vector<Exchange*> exchanges;
  for (const auto& exchange : ranks) exchanges.push_back(exchange.get());
  const std::vector<std::span<float>> spans(buckets.begin(), buckets.end());
  ASSERT_TRUE(run_loopback_step(exchanges, spans, 0, {}).ok());
  EXPECT_EQ(buckets[3][0], 1.0f + 0x1p-20f);
  EXPECT_EQ(buckets[3][64 * 64], 1.0f);
}

TEST(RingsInGroups, MachinesOfDifferentSizesAverageOverRanks) {
  std::vector<std::unique_ptr<Exchange>> ranks;
  const auto layout =
      std::make_shared<const Layout>(Layout::create(small_tensors(), 3, {.codec = "raw"}).value());
  std::vector<Exchange*> exchanges;
  for (uint32_t r = 0; r < kMachines.size(); ++r) {
    ranks.push_back(make_exchange("hierarchical:between=ring,within=ring", layout, r,
                                  Execution::create().value(), {.machine_of_rank = kMachines})
                        .value());
    exchanges.push_back(ranks.back().get());
  }
  Buckets buckets(kMachines.size(), std::vector<float>(layout->numel()));
  for (size_t r = 0; r < buckets.size(); ++r) std::ranges::fill(buckets[r], static_cast<float>(r));
  const std::vector<std::span<float>> spans(buckets.begin(), buckets.end());
  ASSERT_TRUE(run_loopback_step(exchanges, spans, 0, {}).ok());
  for (const auto& bucket : buckets) EXPECT_EQ(bucket[7], 2.5f);
}

TEST(RingsInGroups, AStrangersMessageIsRefusedAndAnErrorOfALegNamesTheRanksOfTheWorld) {
  Groups groups(kRings, 4, 2, "raw");
  Buckets buckets = random_buckets(4, groups.numel(), 1);
  for (uint32_t r = 0; r < 4; ++r) ASSERT_TRUE(groups.rank(r).start(buckets[r], r == 3).ok());
  const std::vector<OutgoingMessage> sent = groups.rank(3).take_outgoing();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(groups.rank(1).receive(3, sent[0].bytes).message(),
            "rank 3 sent rank 1 a message, which talks to its machine alone");
  const std::string said = groups.rank(2).receive(3, sent[0].bytes).message();
  EXPECT_TRUE(said.starts_with("rank 3 sent its push of step 1, rank 2 is at step 0;")) << said;
}

TEST(RingsInGroups, ADamagedMessageIsThatOfItsSender) {
  Groups groups(kRings, 4, 2, "raw");
  Buckets buckets = random_buckets(4, groups.numel(), 1);
  for (uint32_t r = 0; r < 4; ++r) ASSERT_TRUE(groups.rank(r).start(buckets[r], 0).ok());
  const std::vector<OutgoingMessage> sent = groups.rank(3).take_outgoing();
  std::vector<std::byte> damaged(sent[0].bytes.begin(), sent[0].bytes.end());
  damaged.back() ^= std::byte{4};
  EXPECT_EQ(groups.rank(2).receive(3, damaged).message(),
            "message from rank 3: packet: the checksum does not match the content; it was damaged "
            "on the way, or in the memory of a rank");
}

}  // namespace
}  // namespace gradwire
