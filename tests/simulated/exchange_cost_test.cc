// What cost_of says, against the messages and bytes of the exchanges.

#include "gradwire/exchange_cost.h"

#include <cmath>

#include "gtest/gtest.h"

#include "engines/simulated/simulation.h"
#include "tests/exchange/cluster.h"

namespace gradwire {
namespace {

constexpr uint64_t kValues = 1 << 16;
// More than the headers of a packet with small_tensors().
constexpr double kHeaderBytes = 100;

// A step of an exchange, in which each rank has a machine of its own.
struct Counted {
  std::shared_ptr<const Layout> layout;
  SimulatedStep step;
  std::vector<ExchangeStats> stats;  // of each rank
};

Counted count(const std::string& exchange, const std::string& codec, uint32_t ranks,
              uint32_t servers) {
  static const std::vector<float> values = random_buckets(1, kValues, 5)[0];
  LayoutOptions layout{.codec = codec};
  layout.servers = servers;
  Counted counted;
  counted.layout = std::make_shared<const Layout>(
      Layout::create(small_tensors(), ranks + servers, layout).value());
  SimulationOptions options;
  options.exchange = exchange;
  options.ranks = ranks + servers;
  options.buckets = {{.layout = counted.layout}};
  options.values = values;
  options.network.ranks_alone = servers;
  const auto simulation = Simulation::create(options).value();
  counted.step = simulation->step().value();
  for (uint32_t r = 0; r < options.ranks; ++r) counted.stats.push_back(simulation->stats(r)[0]);
  return counted;
}

ExchangeVolume volume_of(const Layout& layout, double bytes_per_value) {
  ExchangeVolume volume = {.ranks = layout.workers(), .servers = layout.servers()};
  volume.values = static_cast<double>(layout.numel());
  volume.push_bytes = volume.pull_bytes = bytes_per_value * volume.values;
  const uint32_t first = layout.servers() > 0 ? layout.workers() : 0;
  volume.shares.resize(layout.world_size() - first);
  for (const Segment& segment : layout.segments()) {
    volume.shares[segment.owner - first] += static_cast<double>(segment.n) / volume.values;
  }
  return volume;
}

void compare(const std::string& exchange, const Counted& counted, const ExchangeVolume& volume) {
  const ExchangeChoice choice = ExchangeChoice::parse(exchange).value();
  for (uint32_t r = 0; r < counted.stats.size(); ++r) {
    SCOPED_TRACE(exchange + ", rank " + std::to_string(r) + " of " +
                 std::to_string(counted.stats.size()));
    const ExchangeCost cost = cost_of(choice, volume, r).value();
    const RankTraffic& traffic = counted.step.traffic[r];
    EXPECT_EQ(cost.messages, counted.step.longest_way);
    EXPECT_EQ(cost.messages_sent, traffic.messages_sent);
    const double sent_headers = static_cast<double>(traffic.bytes_sent) - cost.bytes_sent;
    EXPECT_GE(sent_headers, 0);
    EXPECT_LE(sent_headers, kHeaderBytes * static_cast<double>(cost.messages_sent));
    const double received_headers =
        static_cast<double>(traffic.bytes_received) - cost.bytes_received;
    EXPECT_GE(received_headers, 0);
    EXPECT_LE(received_headers, kHeaderBytes * static_cast<double>(cost.messages_received));
    if (!choice.inner().has_owners || cost.messages == 0) continue;
    const ExchangeStats& stats = counted.stats[r];
    EXPECT_NEAR(cost.values_encoded, static_cast<double>(stats.values_pushed + stats.values_pulled),
                1e-6);
    EXPECT_NEAR(cost.values_decoded, static_cast<double>(stats.values_received), 1e-6);
  }
}

TEST(ExchangeCost, CountsWhatTheExchangesSend) {
  for (const ExchangeInfo* info : exchanges()) {
    for (uint32_t ranks : {1u, 2u, 3u, 7u}) {
      for (uint32_t servers : {1u, 2u}) {
        const uint32_t chosen = info->has_servers ? servers : 0;
        const std::string name(info->name);
        const Counted counted = count(name, "raw", ranks, chosen);
        ExchangeVolume volume = volume_of(*counted.layout, sizeof(float));
        // Without scales, TernGrad's messages of them are sent all the same.
        if (info->adds_trits) volume.scale_bytes = 0;
        compare(name, counted, volume);
      }
    }
  }
}

TEST(ExchangeCost, RefusesWhatAnExchangeDoesNotHave) {
  const auto code = [](const char* exchange, const ExchangeVolume& volume, uint32_t rank) {
    return cost_of(ExchangeChoice::parse(exchange).value(), volume, rank).status().code();
  };
  EXPECT_EQ(code("sharded", {.ranks = 2}, 1), StatusCode::kOk);
  EXPECT_EQ(code("sharded", {.ranks = 2}, 2), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("sharded", {.ranks = 0}, 0), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("sharded", {.ranks = 2, .servers = 1}, 0), StatusCode::kInvalidArgument);
  EXPECT_EQ(code("ring", {.ranks = 2, .shares = {1}}, 0), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace gradwire
