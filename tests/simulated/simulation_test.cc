// The simulated engine: the bytes are those of the loopback, the times follow from them.

#include "engines/simulated/simulation.h"

#include <cmath>

#include "gtest/gtest.h"

#include "gradwire/server.h"
#include "tests/exchange/cluster.h"
#include "tests/exchange/server_sides.h"

namespace gradwire {
namespace {

constexpr double kRate = 1e6;  // bytes a second
constexpr double kLatency = 0.001;

std::shared_ptr<const Layout> layout_of(uint32_t owners, const std::string& codec,
                                        std::vector<TensorInfo> tensors = small_tensors(),
                                        uint32_t servers = 0) {
  LayoutOptions options{.codec = codec};
  options.servers = servers;
  return std::make_shared<const Layout>(
      Layout::create(std::move(tensors), owners, options).value());
}

std::vector<float> random_values(uint64_t n) { return random_buckets(1, n, 5)[0]; }

struct World {
  std::string exchange = "sharded";
  std::string codec = "raw";
  uint32_t ranks = 4;
  uint32_t owners = 4;  // the world size of the layout
  uint32_t servers = 0;
};

SimulationOptions options_of(const World& world, std::span<const float> values) {
  SimulationOptions options;
  options.exchange = world.exchange;
  options.ranks = world.ranks;
  options.buckets = {
      {.layout = layout_of(world.owners, world.codec, small_tensors(), world.servers)}};
  options.values = values;
  options.network.bits_per_second = 8 * kRate;
  options.network.latency = kLatency;
  options.network.ranks_per_machine = world.ranks / world.owners;
  options.network.header_bytes = 0;
  return options;
}

SimulatedStep step_of(const SimulationOptions& options) {
  return Simulation::create(options).value()->step().value();
}

// Counters that do not measure the time of this process.
std::vector<double> counts(const ExchangeStats& stats) {
  std::vector<double> all;
#define GW_EXCHANGE_COUNTER(type, name, python_name)                 \
  if (std::string(python_name).find("seconds") == std::string::npos) \
    all.push_back(static_cast<double>(stats.name));
#include "gradwire/exchange_counters.def"
#undef GW_EXCHANGE_COUNTER
  return all;
}

TEST(Simulation, BytesAreThoseOfTheLoopback) {
  const std::vector<float> values = random_values(1 << 16);
  std::vector<World> worlds;
  for (uint32_t ranks : {1u, 2u, 3u, 8u}) {
    for (const char* codec : {"raw", "3lc:s=1,coder=rice", "qsgd:bits=4"}) {
      for (const char* exchange : {"sharded", "ring", "broadcast"}) {
        worlds.push_back({exchange, codec, ranks, ranks});
      }
    }
    worlds.push_back({"terngrad", "terngrad", ranks, ranks});
    worlds.push_back({"hierarchical:ranks=2", "3lc", 2 * ranks, ranks});
    worlds.push_back({"hierarchical:between=ring,within=ring", "int8", 3 * ranks, ranks});
  }
  for (const World& world : worlds) {
    SCOPED_TRACE(world.exchange + " " + world.codec + " " + std::to_string(world.ranks));
    const SimulationOptions options = options_of(world, values);
    const auto simulation = Simulation::create(options).value();
    std::vector<uint32_t> machines;
    for (uint32_t r = 0; r < world.ranks && world.exchange.find("within") != std::string::npos;
         ++r) {
      machines.push_back(r / 3);
    }
    Cluster cluster(
        [&](const std::shared_ptr<const Layout>&, uint32_t rank) {
          return make_exchange(world.exchange, options.buckets[0].layout, rank,
                               Execution::create().value(), {.machine_of_rank = machines})
              .value();
        },
        world.ranks, world.codec);
    for (uint64_t step = 0; step < 3; ++step) {
      Buckets buckets(world.ranks, std::vector<float>(cluster.numel()));
      for (uint64_t r = 0; r < world.ranks; ++r) {
        for (uint64_t i = 0; i < cluster.numel(); ++i) {
          buckets[r][i] = values[((r + step * world.ranks) * 104'729 + i) % values.size()];
        }
      }
      ASSERT_TRUE(cluster.step(buckets, step).ok());
      const SimulatedStep simulated = simulation->step().value();
      uint64_t sent = 0;
      uint64_t received = 0;
      for (const RankTraffic& traffic : simulated.traffic) {
        sent += traffic.bytes_sent;
        received += traffic.bytes_received;
      }
      EXPECT_EQ(sent, received);
    }
    for (uint32_t r = 0; r < world.ranks; ++r) {
      EXPECT_EQ(counts(simulation->stats(r)[0]), counts(cluster.rank(r).stats())) << r;
    }
  }
}

// A side of an exchange with servers, whose model changes by the averages.
std::unique_ptr<Exchange> make_side(const std::shared_ptr<const Layout>& layout, uint32_t rank,
                                    ServerOptions::Pulls pulls) {
  const ServerOptions options = {.pulls = pulls};
  Execution execution = Execution::create().value();
  if (rank < layout->workers()) {
    return make_server_worker(layout, rank, std::move(execution), options, {}).value();
  }
  ShardUpdate update = [](std::span<float>) { return Status(); };
  if (pulls == ServerOptions::Pulls::kGradients) update = {};
  return make_server(layout, rank, std::move(execution), options, update).value();
}

TEST(Simulation, BytesOfServersAreThoseOfTheLoopback) {
  const std::vector<float> values = random_values(1 << 16);
  std::vector<World> worlds;
  for (uint32_t workers : {1u, 2u, 5u}) {
    for (uint32_t servers : {1u, 2u, 4u}) {
      const uint32_t ranks = workers + servers;
      for (const char* codec : {"raw", "3lc:s=1,coder=rice", "terngrad"}) {
        for (const char* exchange : {"server", "server:pulls=gradients"}) {
          worlds.push_back({exchange, codec, ranks, ranks, servers});
        }
      }
    }
  }
  for (const World& world : worlds) {
    SCOPED_TRACE(world.exchange + " " + world.codec + " " + std::to_string(world.ranks) + " " +
                 std::to_string(world.servers));
    const SimulationOptions options = options_of(world, values);
    const auto simulation = Simulation::create(options).value();
    const uint32_t workers = world.ranks - world.servers;
    const auto pulls = world.exchange == "server" ? ServerOptions::Pulls::kUpdates
                                                  : ServerOptions::Pulls::kGradients;
    LayoutOptions layout{.codec = world.codec};
    layout.servers = world.servers;
    Cluster cluster([&](const std::shared_ptr<const Layout>& of,
                        uint32_t rank) { return make_side(of, rank, pulls); },
                    world.ranks, layout, small_tensors());
    for (uint64_t step = 0; step < 3; ++step) {
      Buckets buckets(world.ranks, std::vector<float>(cluster.numel()));
      for (uint64_t r = 0; r < workers; ++r) {
        for (uint64_t i = 0; i < cluster.numel(); ++i) {
          buckets[r][i] = values[((r + step * workers) * 104'729 + i) % values.size()];
        }
      }
      ASSERT_TRUE(cluster.step(buckets, step).ok());
      ASSERT_TRUE(simulation->step().ok());
    }
    for (uint32_t r = 0; r < world.ranks; ++r) {
      EXPECT_EQ(counts(simulation->stats(r)[0]), counts(cluster.rank(r).stats())) << r;
    }
  }
}

TEST(Simulation, BytesOnTheLinksAreThoseOfTheCounters) {
  const std::vector<float> values = random_values(1 << 16);
  const auto simulation = Simulation::create(options_of({}, values)).value();
  const SimulatedStep step = simulation->step().value();
  for (uint32_t r = 0; r < 4; ++r) {
    const ExchangeStats stats = simulation->stats(r)[0];
    EXPECT_EQ(step.traffic[r].bytes_sent, stats.push_bytes_sent + stats.pull_bytes_sent);
    EXPECT_EQ(step.traffic[r].bytes_received,
              stats.push_bytes_received + stats.pull_bytes_received);
    EXPECT_EQ(step.traffic[r].messages_sent, 6u);
    EXPECT_EQ(step.traffic[r].local_bytes_sent, 0u);
  }
}

// The messages on the longest way of docs/reference/exchanges.md.
TEST(Simulation, LongestWayIsAsDocumented) {
  const std::vector<float> values = random_values(1 << 16);
  const auto way = [&](const World& world) {
    return step_of(options_of(world, values)).longest_way;
  };
  for (uint32_t ranks : {2u, 5u, 8u}) {
    EXPECT_EQ(way({"sharded", "3lc", ranks, ranks}), 2u);
    EXPECT_EQ(way({"ring", "int8", ranks, ranks}), 2 * (ranks - 1));
    EXPECT_EQ(way({"broadcast", "qsgd", ranks, ranks}), 1u);
    EXPECT_EQ(way({"terngrad", "terngrad", ranks, ranks}), 3u);
    EXPECT_EQ(way({"hierarchical", "3lc", 2 * ranks, ranks}), 4u);
    EXPECT_EQ(way({"hierarchical:between=ring,within=ring", "int8", 4 * ranks, ranks}),
              3 * 3 + 2 * (ranks - 1));
    EXPECT_EQ(way({"server", "3lc", ranks + 2, ranks + 2, 2}), 2u);
    EXPECT_EQ(way({"server:pulls=gradients", "raw", ranks + 1, ranks + 1, 1}), 2u);
    EXPECT_EQ(way({"server:pulls=gradients", "terngrad", ranks + 1, ranks + 1, 1}), 4u);
  }
}

// One tensor in two equal shards, of 40960 values each.
SimulationOptions two_ranks(std::span<const float> values) {
  SimulationOptions options = options_of({.ranks = 2, .owners = 2}, values);
  options.buckets = {{.layout = layout_of(2, "raw", {{"only", {2, 40960}}})}};
  return options;
}

TEST(Simulation, TwoRanksNeedTheTimeOfTheirBytesAndMessages) {
  const std::vector<float> values = random_values(1 << 16);
  const SimulatedStep step = step_of(two_ranks(values));
  // A push and then a pull, each of a shard and the headers of a packet with one segment.
  const double message = 4 * 40960 + 47;
  EXPECT_EQ(step.traffic[0].bytes_sent, 2 * message);
  EXPECT_NEAR(step.seconds, 2 * (kLatency + message / kRate), 1e-9);
  EXPECT_EQ(step.codec_seconds, 0);
}

// The server's link takes the pushes of all workers, and then sends each of them the pull.
TEST(Simulation, AServerNeedsTheTimeOfAllPushesAndPulls) {
  const std::vector<float> values = random_values(1 << 16);
  for (uint32_t per_machine : {1u, 2u, 3u}) {
    SimulationOptions options = options_of({.ranks = 4, .owners = 4}, values);
    options.exchange = "server";
    options.network.ranks_per_machine = per_machine;  // the server has its own
    options.buckets = {{.layout = layout_of(4, "raw", {{"only", {2, 40960}}}, 1)}};
    const SimulatedStep step = step_of(options);
    const double message = 4 * 2 * 40960 + 47;
    for (uint32_t r = 0; r < 4; ++r) {
      EXPECT_EQ(step.traffic[r].bytes_sent, (r < 3 ? 1 : 3) * message) << r;
      EXPECT_EQ(step.traffic[r].bytes_received, (r < 3 ? 1 : 3) * message) << r;
    }
    EXPECT_NEAR(step.seconds, 2 * (kLatency + 3 * message / kRate), 1e-9) << per_machine;
    options.cost = [](const std::string&) { return CodecCost{.encode = 1e-5, .decode = 1e-6}; };
    EXPECT_NEAR(step_of(options).codec_seconds, 0.8192 + 3 * 0.08192, 1e-9) << "the server's";
  }
}

TEST(Simulation, CodecsAndMessagesAreCharged) {
  const std::vector<float> values = random_values(1 << 16);
  SimulationOptions options = two_ranks(values);
  const double before = step_of(options).seconds;
  options.cost = [](const std::string&) { return CodecCost{.encode = 1e-5, .decode = 1e-6}; };
  const SimulatedStep charged = step_of(options);
  // Each rank encodes a push and a pull of 40960 values, and decodes as many.
  EXPECT_NEAR(charged.codec_seconds, 2 * 0.4096 + 2 * 0.04096, 1e-9);
  EXPECT_NEAR(charged.seconds - before, charged.codec_seconds, 1e-9);
  options.per_message = 0.5;
  // Send the push; receive it and send the pull; receive that.
  EXPECT_NEAR(step_of(options).seconds - charged.seconds, 4 * 0.5, 1e-9);
}

TEST(Simulation, LinksPassABurstAfterTheyWereIdle) {
  const std::vector<float> values = random_values(1 << 16);
  SimulationOptions options = two_ranks(values);
  options.network.burst_bytes = 100'000;
  const double steady = 2 * (kLatency + (4 * 40960 + 47) / kRate);
  const double burst = 100'000 / kRate;
  // Links are idle for the latency before the pull, and before the next step's push.
  for (double pause : {0.0, 0.05}) {
    options.pause = pause;
    const auto simulation = Simulation::create(options).value();
    EXPECT_NEAR(simulation->step().value().seconds, steady - burst - kLatency, 1e-9);
    EXPECT_NEAR(simulation->step().value().seconds, steady - pause - 2 * kLatency, 1e-9);
  }
  options.network.burst_bytes = 1'000'000;
  EXPECT_NEAR(step_of(options).seconds, 2 * kLatency, 1e-9);
}

TEST(Simulation, ABucketWaitsForItsGradientsAndForTheBucketBefore) {
  const std::vector<float> values = random_values(1 << 16);
  SimulationOptions options = options_of({}, values);
  const double alone = step_of(options).seconds;
  const auto with_buckets = [&](std::vector<double> ready) {
    options.buckets.clear();
    for (double seconds : ready) {
      options.buckets.push_back({.layout = layout_of(4, "raw"), .ready = seconds});
    }
    return step_of(options).seconds;
  };
  EXPECT_NEAR(with_buckets({1}), 1 + alone, 1e-9);
  EXPECT_NEAR(with_buckets({0, 1}), 1 + alone, 1e-9) << "the first bucket is hidden";
  const double together = with_buckets({0, 0});
  EXPECT_GT(together, 1.5 * alone);
  EXPECT_LE(together, 2.05 * alone) << "pushes of two buckets may meet at an owner";
  EXPECT_NEAR(with_buckets({1, 1}), 1 + together, 1e-9);
}

TEST(Simulation, LessBandwidthMoreRanksAndMoreLatencyTakeLonger) {
  const std::vector<float> values = random_values(1 << 16);
  for (const char* exchange : {"sharded", "ring", "broadcast"}) {
    double before = 0;
    for (uint32_t ranks : {2u, 4u, 8u, 16u}) {
      SimulationOptions options = options_of({exchange, "int8", ranks, ranks}, values);
      const double seconds = step_of(options).seconds;
      EXPECT_GT(seconds, before) << exchange << " " << ranks;
      before = seconds;
      options.network.bits_per_second /= 2;
      const double slow = step_of(options).seconds;
      EXPECT_GT(slow, seconds);
      options.network.latency *= 2;
      EXPECT_GT(step_of(options).seconds, slow);
    }
  }
}

TEST(Simulation, IsRepeatable) {
  const std::vector<float> values = random_values(1 << 16);
  const SimulationOptions options = options_of({"ring", "3lc:s=1,coder=rice", 5, 5}, values);
  const auto first = Simulation::create(options).value();
  const auto second = Simulation::create(options).value();
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(first->step().value().seconds, second->step().value().seconds);
  }
}

TEST(Simulation, RefusesNonsense) {
  const std::vector<float> values = random_values(100);
  const auto code = [&](const std::function<void(SimulationOptions&)>& change) {
    SimulationOptions options = options_of({}, values);
    change(options);
    return Simulation::create(options).status().code();
  };
  constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](auto& o) { o.ranks = 0; }), kInvalid);
  EXPECT_EQ(code([](auto& o) { o.ranks = 5; }), kInvalid) << "more than the layout has";
  EXPECT_EQ(code([](auto& o) { o.ranks = 3; }), kInvalid) << "fewer than the layout has";
  EXPECT_EQ(code([](auto& o) { o.exchange = "hierarchical:ranks=2"; }), kInvalid);
  EXPECT_EQ(code([](auto& o) { o.buckets.clear(); }), kInvalid);
  EXPECT_EQ(code([](auto& o) { o.values = {}; }), kInvalid);
  EXPECT_EQ(code([](auto& o) { o.exchange = "star"; }), kInvalid);
  EXPECT_EQ(code([](auto& o) { o.exchange = "server"; }), kInvalid) << "layouts without servers";
  EXPECT_EQ(code([](auto& o) { o.exchange = "server:pulls=trits"; }), kInvalid);
  const auto with_servers = [](SimulationOptions& o, uint32_t servers) {
    o.buckets = {{.layout = layout_of(4, "raw", small_tensors(), servers)}};
  };
  EXPECT_EQ(code([&](auto& o) { with_servers(o, 1); }), kInvalid) << "sharded with servers";
  const auto served = [&](uint32_t ranks) {
    return code([&](auto& o) {
      with_servers(o, 2);
      o.exchange = "server";
      o.ranks = ranks;
    });
  };
  EXPECT_EQ(served(4), StatusCode::kOk);
  EXPECT_EQ(served(5), kInvalid);
  EXPECT_EQ(served(2), kInvalid) << "no worker";
  EXPECT_EQ(code([&](auto& o) {
              o.exchange = "server";
              with_servers(o, 2);
              o.buckets.push_back({.layout = layout_of(4, "raw", small_tensors(), 1)});
            }),
            kInvalid);
  EXPECT_EQ(code([](auto& o) { o.network.bits_per_second = 0; }), kInvalid);
  EXPECT_EQ(code([](auto& o) { o.network.bits_per_second = NAN; }), kInvalid);
  EXPECT_EQ(code([](auto& o) { o.network.latency = -1; }), kInvalid);
  EXPECT_EQ(code([](auto& o) { o.pause = -1; }), kInvalid);
  EXPECT_EQ(code([](auto& o) { o.network.turn_bytes = 0; }), kInvalid);
}

}  // namespace
}  // namespace gradwire
