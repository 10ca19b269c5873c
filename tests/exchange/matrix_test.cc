// Every exchange with every world size, every layout and every codec, with messages in random
// order. Not all combinations run: each world size, layout and codec meets each exchange, and each
// round combines them differently.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "gtest/gtest.h"

#include "gradwire/exchange_choice.h"
#include "tests/exchange/cluster.h"

namespace gradwire {
namespace {

const std::vector<uint32_t> kWorlds = {1,  2,  3,  4,  5,  6,  7,  8,  9,
                                       10, 11, 12, 13, 14, 15, 16, 24, 32};

std::vector<TensorInfo> resnet20() {
  std::vector<TensorInfo> tensors;
  const auto add_convolution = [&](uint64_t out, uint64_t in) {
    const std::string name = "conv" + std::to_string(tensors.size());
    tensors.push_back({name + ".weight", {out, in, 3, 3}});
    tensors.push_back({name + ".norm.weight", {out}});
    tensors.push_back({name + ".norm.bias", {out}});
  };
  uint64_t in = 3;
  for (uint64_t out :
       {16, 16, 16, 16, 16, 16, 16, 32, 32, 32, 32, 32, 32, 64, 64, 64, 64, 64, 64}) {
    add_convolution(out, in);
    in = out;
  }
  tensors.push_back({"fc.weight", {10, 64}});
  tensors.push_back({"fc.bias", {10}});
  return tensors;
}

std::vector<std::vector<TensorInfo>> layouts() {
  std::vector<std::vector<TensorInfo>> all = {resnet20(), small_tensors()};
  for (uint64_t n : {0, 1, 4, 100, 4097, 40961, 99999}) all.push_back({{"only", {n, 1}}});
  return all;
}

std::vector<std::string> codec_texts() {
  std::vector<std::string> texts;
  for (const CodecInfo* info : codecs()) texts.emplace_back(info->name);
  for (const char* variant :
       {"3lc:s=1.75", "3lc:s=1.75,coder=rice", "3lc:coder=none,bucket=320", "3lc:residual=bf16",
        "int8:ef=off", "onebit:bucket=512", "topk:ratio=0.25,index=rice", "inceptionn:bound=8",
        "inceptionn:mode=strict", "terngrad:pack=trits5,coder=zre", "terngrad:clip=0,bucket=640",
        "stoch3:bucket=320", "stc:density=0.02", "qsgd:levels=1,coder=elias",
        "qsgd:bits=8,norm=l2,coder=elias-dense", "qsgd:levels=1000"}) {
    texts.emplace_back(variant);
  }
  return texts;
}

// The largest error of one encoding, relative to the largest magnitude (from the codecs' spec.md).
// Codecs without a smaller bound send each value as 0 or as a number up to the largest.
double largest_error(const Codec& codec) {
  const std::string_view name = codec.info().name;
  const std::string text = codec.text();
  if (name == "raw") return 0;
  if (name == "bf16") return 0x1p-8;
  if (name == "fp16") return 0x1p-11 + 1e-6;  // denormals
  if (name == "int8") return 1.01 / 254;
  if (name == "inceptionn") return 0x1p-7;  // the 8-bit class, for every bound; values below 1
  if (name == "3lc") return text.find("s=1.75") == std::string::npos ? 0.5 : 0.875;
  if (name == "qsgd" && text.find("l2") == std::string::npos) {
    return 1.01 / ((codec.wire().param_a & 127) | (codec.wire().param_a >> 10) << 7);
  }
  if (name == "qgd") return 320;  // the root of the longest tensor
  // onebit sends the mean of a group's values of one sign; qsgd's unit may be the norm of a group
  // of 512 divided by 127.
  return name == "onebit" ? 2 : 1;
}

// Two ranks share a machine.
uint32_t machines(uint32_t ranks) { return (ranks + 1) / 2; }

// The error of the pushes, of values up to 1, plus that of the pull of their mean.
double sharded_bound(uint32_t ranks, double e) { return ranks == 1 ? 0 : e + e * (1 + e); }

double ring_bound(uint32_t ranks, double e) {
  double sum = 1;  // the largest magnitude of the sum so far
  double error = 0;
  for (uint32_t hop = 1; hop < ranks; ++hop) {
    error += e * sum;
    sum = sum * (1 + e) + 1;
  }
  return ranks == 1 ? 0 : (error + e * sum) / ranks;
}

// A lone rank on the last machine makes the others' means larger than 1.
double hierarchical_bound(uint32_t ranks, double e) {
  return sharded_bound(machines(ranks), e) * 2 * machines(ranks) / ranks;
}

// The largest error of the mean of N values of at most 1, if each encoding has an error of `e`. An
// exchange is held to that of `sharded` unless its description says that its error is larger.
double error_bound(const ExchangeInfo& exchange, uint32_t ranks, double e) {
  if (!exchange.has_owners) return ranks == 1 ? 0 : e;
  if (exchange.encodes_sums_on_the_way) return ring_bound(ranks, e);
  if (exchange.between_machines) return hierarchical_bound(ranks, e);
  return sharded_bound(ranks, e);
}

// Like Cluster, for exchanges whose layout has another world size.
struct Ranks {
  std::shared_ptr<const Layout> layout;
  std::vector<std::unique_ptr<Exchange>> exchanges;

  Ranks(const ExchangeInfo& exchange, uint32_t world, const std::string& codec,
        const std::vector<TensorInfo>& tensors) {
    layout = std::make_shared<const Layout>(
        Layout::create(tensors, exchange.between_machines ? machines(world) : world,
                       {.codec = codec})
            .value());
    for (uint32_t rank = 0; rank < world; ++rank) {
      ExchangeOptions options;
      for (uint32_t r = 0; exchange.between_machines && r < world; ++r) {
        options.machine_of_rank.push_back(r / 2);
      }
      exchanges.push_back(
          make_exchange(exchange.name, layout, rank, Execution::create().value(), options).value());
    }
  }

  Status step(Buckets& buckets, const LoopbackOptions& options) {
    std::vector<Exchange*> pointers;
    for (const auto& exchange : exchanges) pointers.push_back(exchange.get());
    const std::vector<std::span<float>> spans(buckets.begin(), buckets.end());
    return run_loopback_step(pointers, spans, 0, options);
  }
};

// Values below 1 / 8, cut from one series, because drawing them would take most of the time.
Buckets small_values(uint32_t world, uint64_t n, uint64_t seed) {
  static const std::vector<float> series = [] {
    std::vector<float> values = random_buckets(1, (1 << 19) - 1, 7)[0];
    for (float& value : values) value = std::clamp(value / 32, -0.124f, 0.124f);
    return values;
  }();
  Buckets buckets(world, std::vector<float>(n));
  for (uint32_t r = 0; r < world; ++r) {
    const uint64_t from = (seed * 7919 + r * 104729) % series.size();
    for (uint64_t i = 0; i < n; ++i) buckets[r][i] = series[(from + i) % series.size()];
  }
  return buckets;
}

class Matrix : public testing::TestWithParam<const ExchangeInfo*> {
 protected:
  // A variant of the codec that this exchange accepts.
  static std::string taken(const std::string& text) {
    if (!GetParam()->adds_trits) return text;
    const auto codec = Codec::parse(text, FeedbackDefault::kOff);
    return codec.ok() ? codec.value()->text() : "3lc:ef=off";  // where residual= is given
  }
};

INSTANTIATE_TEST_SUITE_P(All, Matrix, testing::ValuesIn(among_equals()),
                         [](const auto& exchange) { return std::string(exchange.param->name); });

TEST(ExchangeChoice, TextsAreReadAndWritten) {
  for (const char* text :
       {"sharded", "ring", "broadcast", "terngrad", "hierarchical:between=sharded",
        "hierarchical:between=ring,ranks=4", "hierarchical:between=terngrad,ranks=1",
        "hierarchical:between=ring,within=ring,ranks=4",
        "hierarchical:between=sharded,within=ring,within_codec=qsgd:bits=8,bucket=64"}) {
    EXPECT_EQ(ExchangeChoice::parse(text).value().text(), text);
  }
  EXPECT_EQ(ExchangeChoice::parse("hierarchical").value().text(), "hierarchical:between=sharded");
  for (const char* text :
       {"", "star", "ring:ranks=2", "hierarchical:", "hierarchical:between=star",
        "hierarchical:between=hierarchical", "hierarchical:within=star",
        "hierarchical:within=hierarchical", "hierarchical:colour=red", "hierarchical:ring",
        "hierarchical:ranks=2,", "hierarchical:ranks=2,,within=ring"}) {
    const Status status = ExchangeChoice::parse(text).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find("hierarchical[:between="), std::string::npos)
        << status.message();
  }
  for (const char* text : {"hierarchical:ranks=2,ranks=4", "hierarchical:between=ring,between=ring",
                           "hierarchical:within=ring,ranks=2,within=sharded"}) {
    EXPECT_NE(ExchangeChoice::parse(text).status().message().find("is given twice"),
              std::string::npos)
        << text;
  }
}

TEST(ExchangeChoice, TheCodecInsideAMachineStandsLastAndKeepsNoResidual) {
  const auto choice =
      ExchangeChoice::parse("hierarchical:ranks=2,within_codec=int8:bucket=64,ef=off").value();
  EXPECT_EQ(choice.within_codec(), Codec::parse("int8:bucket=64,ef=off").value()->text());
  EXPECT_EQ(choice.uncompressed().text(), "hierarchical:between=sharded,ranks=2");
  EXPECT_NE(
      ExchangeChoice::parse("hierarchical:within_codec=int8").status().message().find("add ef=off"),
      std::string::npos);
  // Here "ranks" would be a parameter of the codec.
  EXPECT_NE(ExchangeChoice::parse("hierarchical:within_codec=bf16,ranks=2")
                .status()
                .message()
                .find("ranks"),
            std::string::npos);
  EXPECT_EQ(ExchangeChoice::parse("hierarchical:within_codec=zip").status().code(),
            StatusCode::kUnknownCodec);
}

TEST(ExchangeChoice, OptionsThatAnExchangeDoesNotTakeAreRefused) {
  const auto layout =
      std::make_shared<const Layout>(Layout::create({{"a", {4, 4}}}, 2, {.codec = "raw"}).value());
  const auto refused = [&](const char* text, ExchangeOptions options) {
    return make_exchange(text, layout, 0, Execution::create().value(), std::move(options))
               .status()
               .code() == StatusCode::kInvalidArgument;
  };
  const ShardUpdate update = [](std::span<float>) { return Status(); };
  EXPECT_TRUE(refused("terngrad", {.reduction = Reduction::kSum}));
  EXPECT_TRUE(refused("ring", {.update = update}));
  EXPECT_TRUE(refused("broadcast", {.update = update}));
  EXPECT_TRUE(refused("hierarchical:ranks=2", {.update = update}));
  EXPECT_TRUE(refused("sharded", {.machine_of_rank = {0, 1}}));
  EXPECT_TRUE(refused("hierarchical", {}));
  EXPECT_FALSE(refused("hierarchical:ranks=2", {.reduction = Reduction::kSum}));
}

TEST_P(Matrix, AllRanksEndWithTheSameBitsAndTheMeanWithinTheCodecsBound) {
  const std::vector<std::string> codecs = codec_texts();
  const std::vector<std::vector<TensorInfo>> shapes = layouts();
  // World size, layout and codec advance together; in each round, the layouts and codecs are
  // shifted by one more, so that they meet in other combinations.
  const size_t round = std::lcm(kWorlds.size(), codecs.size());
  const size_t cases = std::max<size_t>(160, codecs.size());
  for (size_t i = 0; i < cases; ++i) {
    const uint32_t world = kWorlds[i % kWorlds.size()];
    const std::string codec = taken(codecs[(i + i / round) % codecs.size()]);
    const auto& tensors = shapes[(i + i / shapes.size()) % shapes.size()];
    // Where each hop sends larger values than it got, a long ring ends in infinities.
    if (GetParam()->encodes_sums_on_the_way &&
        std::isinf(Codec::parse(codec).value()->scale_growth())) {
      continue;
    }
    SCOPED_TRACE(std::to_string(world) + " ranks, " + codec + ", tensor " + tensors[0].name + " " +
                 std::to_string(tensors[0].numel()));
    Ranks ranks(*GetParam(), world, codec, tensors);
    const uint64_t n = ranks.layout->numel();
    Buckets buckets = small_values(world, n, i);
    double largest = 0;
    std::vector<double> mean(n);
    for (const auto& bucket : buckets) {
      for (uint64_t k = 0; k < n; ++k) {
        mean[k] += double{bucket[k]} / world;
        largest = std::max(largest, std::abs(double{bucket[k]}));
      }
    }
    const Status status = ranks.step(buckets, {.seed = i, .delivery = {}});
    ASSERT_TRUE(status.ok()) << status.message();
    for (uint32_t r = 1; r < world; ++r) ASSERT_TRUE(same_bits(buckets[r], buckets[0])) << r;
    const auto parsed = Codec::parse(codec).value();
    // inceptionn's error does not shrink with the values.
    const double scale = parsed->info().name == "inceptionn" ? 1 : largest;
    const double bound = error_bound(*GetParam(), world, largest_error(*parsed)) * scale + 1e-6;
    for (uint64_t k = 0; k < n; ++k) ASSERT_LE(std::abs(buckets[0][k] - mean[k]), bound) << k;
  }
}

TEST_P(Matrix, EqualInputsAreExactWhereTheCodecIs) {
  for (const char* text : {"raw", "bf16", "fp16", "3lc", "3lc:coder=rice", "stoch3",
                           "terngrad:clip=0", "inceptionn"}) {
    for (uint32_t world : {1u, 2u, 5u, 8u, 16u}) {
      // With 5 ranks the last machine has one rank, and sums of trits are divided by 5, so both
      // round.
      if (world == 5 && GetParam()->between_machines) continue;
      if (world == 5 && GetParam()->adds_trits && text == std::string("terngrad:clip=0")) continue;
      Ranks ranks(*GetParam(), world, taken(text), small_tensors());
      std::vector<float> input = small_values(1, ranks.layout->numel(), world)[0];
      for (float& value : input) value = value > 0.02f ? 0.5f : value < -0.02f ? -0.5f : 0.0f;
      Buckets buckets(world, input);
      ASSERT_TRUE(ranks.step(buckets, {.seed = world, .delivery = {}}).ok());
      for (uint32_t r = 0; r < world; ++r) {
        // All bits are equal, except the signs of zeros.
        ASSERT_EQ(buckets[r], input) << text << " " << world;
      }
    }
  }
}

TEST_P(Matrix, AnyMessageThatIsLostOrRepeatedIsAnError) {
  for (uint32_t world : {2u, 5u}) {
    uint64_t sent = 0;
    const auto run = [&](uint64_t victim, Delivery delivery) {
      Ranks ranks(*GetParam(), world, taken("3lc"), {{"only", {world, 4096}}});
      Buckets buckets = small_values(world, ranks.layout->numel(), victim);
      sent = 0;
      return ranks.step(buckets, {.seed = victim, .delivery = [&](uint32_t, uint32_t, uint64_t i) {
                                    ++sent;
                                    return i == victim ? delivery : Delivery::kOnce;
                                  }});
    };
    ASSERT_TRUE(run(0, Delivery::kOnce).ok());
    const uint64_t messages = sent;
    EXPECT_GE(messages, world);
    for (uint64_t victim = 0; victim < messages; ++victim) {
      for (Delivery delivery : {Delivery::kLost, Delivery::kTwice}) {
        const Status status = run(victim, delivery);
        EXPECT_FALSE(status.ok()) << world << " " << victim;
        EXPECT_NE(status.message().find("rank "), std::string::npos) << status.message();
      }
    }
  }
}

}  // namespace
}  // namespace gradwire
