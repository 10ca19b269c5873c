#include "gradwire/server.h"

#include <deque>
#include <limits>

#include "gtest/gtest.h"

#include "frame/packet.h"
#include "tests/exchange/server_cluster.h"

namespace gradwire {
namespace {

TEST(Server, ReplicasAreEqualAndTheServerOwesTheRest) {
  const std::pair<uint32_t, uint32_t> worlds[] = {{1, 1}, {2, 1}, {4, 1}, {4, 2}, {8, 3}, {16, 2}};
  for (const auto& [workers, servers] : worlds) {
    for (const char* codec : {"raw", "bf16:ef=on", "3lc:s=1.75,coder=rice", "qsgd", "topk"}) {
      ServerCluster cluster({.workers = workers, .servers = servers, .codec = codec});
      const Status status = cluster.run({.seed = workers, .next = {}, .stalled = {}});
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_FALSE(cluster.replicas_differed()) << codec;
      const std::vector<float> served = cluster.served_model();
      const std::vector<double> owed = cluster.owed(Direction::kPull);
      for (uint32_t worker = 0; worker < workers; ++worker) {
        EXPECT_TRUE(same_bits(cluster.worker_model(worker), cluster.worker_model(0)));
        EXPECT_EQ(cluster.calls(worker), 4u);
      }
      if (std::string(codec) == "qsgd") continue;  // keeps no residual
      for (size_t i = 0; i < served.size(); ++i) {
        ASSERT_NEAR(served[i], cluster.worker_model(0)[i] + owed[i], 1e-5) << codec;
      }
    }
  }
}

TEST(Server, UpdatesLikeALocalOptimizerWhereTheCodecIsExact) {
  ServerCluster cluster({.workers = 3, .servers = 2, .codec = "raw"});
  ASSERT_TRUE(cluster.run({.seed = 5, .next = {}, .stalled = {}}).ok());
  std::vector<float> model(cluster.layout().numel());
  std::vector<float> velocity = model;
  for (uint64_t step = 0; step < 4; ++step) {
    const std::vector<float> a = cluster.gradient(0, step);
    const std::vector<float> b = cluster.gradient(1, step);
    const std::vector<float> c = cluster.gradient(2, step);
    for (size_t i = 0; i < model.size(); ++i) {
      velocity[i] = 0.9f * velocity[i] + (a[i] + b[i] + c[i]) / 3.0f;
      model[i] -= 0.1f * velocity[i];
    }
  }
  EXPECT_TRUE(same_bits(cluster.served_model(), model));
}

TEST(Server, ResultDoesNotDependOnTheOrderOfArrival) {
  std::vector<float> first;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    ServerCluster cluster({.workers = 5, .servers = 2});
    ASSERT_TRUE(cluster.run({.seed = seed, .next = {}, .stalled = {}}).ok());
    if (first.empty()) first = cluster.worker_model(0);
    EXPECT_TRUE(same_bits(first, cluster.worker_model(4))) << seed;
  }
}

TEST(Server, GoesOnWithoutAStalledWorkerAndCountsWhatItDropped) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    ServerCluster cluster({.workers = 4, .servers = 2, .options = {.backup = 1}, .versions = 12});
    uint64_t others = 0;  // versions that the others finished while worker 2 was stalled
    const auto stalled = [&](uint32_t rank, uint64_t tick) {
      if (rank != 2 || tick < 40 || tick > 500) return false;
      others = std::max(others, cluster.version(0, 4) - cluster.version(2, 4));
      return true;
    };
    const Status status = cluster.run({.seed = seed, .next = {}, .stalled = stalled});
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_GE(others, 5u);
    uint64_t dropped = 0;
    for (uint32_t server : {4u, 5u}) {
      EXPECT_GT(cluster.server_side(server).dropped_pushes()[2], 0u);
      for (uint64_t count : cluster.server_side(server).dropped_pushes()) dropped += count;
      for (uint32_t worker = 0; worker < 4; ++worker) {
        EXPECT_GE(cluster.version(worker, server), 12u);
      }
    }
    EXPECT_FALSE(cluster.replicas_differed());
    EXPECT_LT(cluster.calls(2), cluster.calls(0));  // it caught up in one step
    EXPECT_GT(dropped, 0u);
  }
}

TEST(Server, WithoutBackupEveryPushCounts) {
  ServerCluster cluster({.workers = 3, .servers = 1, .versions = 6});
  const auto stalled = [](uint32_t rank, uint64_t tick) { return rank == 1 && tick < 500; };
  ASSERT_TRUE(cluster.run({.seed = 1, .next = {}, .stalled = stalled}).ok());
  EXPECT_EQ(cluster.server_side(3).dropped_pushes(), std::vector<uint64_t>(3));
  for (uint32_t worker = 0; worker < 3; ++worker) EXPECT_EQ(cluster.calls(worker), 6u);
}

TEST(Server, NobodyRunsFurtherAheadThanTheBound) {
  for (uint64_t staleness : {1u, 3u}) {
    for (uint32_t backup : {0u, 1u}) {
      ServerCluster cluster({.workers = 4,
                             .servers = 2,
                             .options = {.backup = backup, .staleness = staleness},
                             .versions = 12});
      uint64_t furthest = 0;
      cluster.on_next = [&](uint32_t rank, uint32_t server) {
        if (backup > 0) return;  // with backup, steps are not versions
        const uint64_t ahead = cluster.calls(rank) - cluster.version(rank, server);
        EXPECT_LE(ahead, staleness);
        furthest = std::max(furthest, ahead);
      };
      const auto stalled = [](uint32_t rank, uint64_t tick) {
        return rank == 3 && tick > 100 && tick < 400;
      };
      const Status status = cluster.run({.seed = staleness, .next = {}, .stalled = stalled});
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(furthest, backup > 0 ? 0 : staleness);
      EXPECT_FALSE(cluster.replicas_differed());
    }
  }
}

TEST(Server, AWorkerTooFarBehindIsNamed) {
  ServerCluster cluster({.workers = 3, .options = {.backup = 1, .history = 4}, .versions = 40});
  const auto stalled = [](uint32_t rank, uint64_t tick) {
    return rank == 1 && tick > 30 && tick < 600;
  };
  const Status status = cluster.run({.seed = 3, .next = {}, .stalled = stalled});
  EXPECT_EQ(status.code(), StatusCode::kLimitExceeded);
  EXPECT_NE(status.message().find("rank 1 is "), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("keeps the last 4"), std::string::npos) << status.message();
}

// The exchanges alone, without an engine: worker 1 takes no step until the server has dropped
// versions that it lacks.
TEST(Server, AWorkerTooFarBehindIsReportedAndTakesTheModel) {
  ServerOptions options{.backup = 1, .history = 2, .behind = ServerOptions::Behind::kReport};
  const auto layout = std::make_shared<const Layout>(
      Layout::create({{"w", {30, 10}}}, 3, {.codec = "3lc", .servers = 1}).value());
  std::vector<float> models[2] = {std::vector<float>(300), std::vector<float>(300)};
  std::vector<float> kept(300);  // the workers' model, as the server computes it
  std::unique_ptr<WorkerSide> workers[2];
  for (uint32_t i = 0; i < 2; ++i) {
    workers[i] = make_server_worker(layout, i, Execution::create().value(), options,
                                    [&models, i](uint32_t, uint64_t, std::span<const float> delta) {
                                      for (size_t k = 0; k < delta.size(); ++k)
                                        models[i][k] += delta[k];
                                      return Status();
                                    })
                     .value();
  }
  auto server = make_server(layout, 2, Execution::create().value(), options, {}).value();
  std::vector<float> bucket(300);
  std::vector<float> gradients[2] = {std::vector<float>(300, 0.5f), std::vector<float>(300, 2.0f)};
  gradients[0][7] = -1.75f;
  const auto deliver = [&](Exchange& from, Exchange& to, uint32_t source) {
    for (OutgoingMessage& message : from.take_outgoing()) {
      ASSERT_TRUE(to.receive(source, message.bytes).ok());
    }
  };
  ASSERT_TRUE(workers[1]->start(gradients[1], 0).ok());
  const auto late = workers[1]->take_outgoing();
  for (uint64_t version = 0; version < 5; ++version) {
    ASSERT_TRUE(server->start(bucket, version).ok());
    ASSERT_TRUE(workers[0]->start(gradients[0], version).ok());
    deliver(*workers[0], *server, 0);
    ASSERT_TRUE(server->done());
    for (size_t k = 0; k < kept.size(); ++k) kept[k] += bucket[k];
    deliver(*server, *workers[0], 2);
  }
  EXPECT_EQ(kept, models[0]);
  EXPECT_EQ(server->caught_up(1).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(server->start(bucket, 5).ok());
  ASSERT_TRUE(server->receive(1, late[0].bytes).ok());
  EXPECT_EQ(server->behind(), std::vector<uint32_t>{1});
  EXPECT_EQ(server->dropped_pushes()[1], 1u);
  models[1] = kept;
  ASSERT_TRUE(server->caught_up(1).ok());
  EXPECT_TRUE(server->behind().empty());
  EXPECT_EQ(workers[1]->catch_up(2, 0).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(workers[1]->catch_up(2, 5).ok());
  EXPECT_TRUE(workers[1]->done());
  ASSERT_TRUE(workers[1]->start(gradients[1], 1).ok());
  deliver(*workers[1], *server, 1);
  ASSERT_TRUE(server->done());
  for (OutgoingMessage& message : server->take_outgoing()) {
    ASSERT_EQ(message.peer, 1u);
    ASSERT_TRUE(workers[1]->receive(2, message.bytes).ok());
  }
  EXPECT_EQ(workers[1]->version(2), 6u);
}

TEST(Server, AVersionThatIsNotFiniteIsSkippedAndOwedAgain) {
  ServerCluster cluster({.workers = 3,
                         .servers = 2,
                         .codec = "3lc:s=1.75",
                         .versions = 3,
                         .rate = -1.0f,
                         .momentum = 0.0f});  // so that the model is the sum of the averages
  cluster.spoil = [](uint32_t rank, uint64_t step, std::vector<float>& gradient) {
    if (rank == 1 && step == 1) gradient[12300] = std::numeric_limits<float>::quiet_NaN();
  };
  std::vector<std::optional<NonFiniteInput>> seen(3);
  cluster.on_next = [&](uint32_t rank, uint32_t server) {
    if (cluster.version(rank, server) == 2) seen[rank] = cluster.rank(rank).non_finite();
  };
  ASSERT_TRUE(cluster.run({.seed = 2, .next = {}, .stalled = {}}).ok());
  for (uint32_t worker = 0; worker < 3; ++worker) {
    ASSERT_TRUE(seen[worker].has_value());
    EXPECT_EQ(seen[worker]->rank, 1u);
    EXPECT_EQ(seen[worker]->tensor, "a.bias");
    EXPECT_EQ(seen[worker]->element, 12u);
    EXPECT_EQ(cluster.rank(worker).stats().non_finite_steps, 1u);
  }
  // Raw tensors keep no residual, so the values that the others pushed are lost.
  std::vector<double> expected(cluster.layout().numel());
  for (const Segment& s : cluster.layout().segments()) {
    const bool kept = s.push_codec->residual_type() != ResidualType::kNone;
    for (uint32_t worker = 0; worker < 3; ++worker) {
      for (uint64_t step = 0; step < 3; ++step) {
        if (step == 1 && (worker == 1 || !kept)) continue;
        const std::vector<float> gradient = cluster.gradient(worker, step);
        for (uint64_t i = s.bucket_offset; i < s.bucket_offset + s.n; ++i) {
          expected[i] += double{gradient[i]} / 3;
        }
      }
    }
  }
  const std::vector<double> push = cluster.owed(Direction::kPush);
  const std::vector<double> pull = cluster.owed(Direction::kPull);
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(cluster.worker_model(0)[i] + push[i] + pull[i], expected[i], 1e-5) << i;
  }
}

// The formulas of server.h.
TEST(Server, CountsTheBytesThatItSays) {
  ServerCluster cluster({.workers = 4, .servers = 2, .codec = "raw", .versions = 1});
  ASSERT_TRUE(cluster.run({.seed = 1, .next = {}, .stalled = {}}).ok());
  std::map<uint32_t, uint64_t> packet;  // the size for each server's tensors
  for (const Segment& s : cluster.layout().segments()) {
    uint64_t& size = packet[s.owner];
    if (size == 0) size = 32 + 8;                         // header, one entry of the codec table
    size += 1 + (s.n < 128 ? 1 : s.n < 16384 ? 2 : 3);    // codec, n
    size += 4 * s.n < 128 ? 1 : 4 * s.n < 16384 ? 2 : 3;  // payload size
    size += 4 * s.n;
  }
  for (uint32_t worker = 0; worker < 4; ++worker) {
    const ExchangeStats& stats = cluster.rank(worker).stats();
    EXPECT_EQ(stats.push_bytes_sent, packet[4] + packet[5]);
    EXPECT_EQ(stats.pull_bytes_received, packet[4] + packet[5]);
    EXPECT_EQ(stats.values_pushed, cluster.layout().numel());
    EXPECT_EQ(stats.pull_bytes_sent, 0u);
  }
  for (uint32_t server : {4u, 5u}) {
    const ExchangeStats& stats = cluster.rank(server).stats();
    EXPECT_EQ(stats.push_bytes_received, 4 * packet[server]);
    EXPECT_EQ(stats.pull_bytes_sent, 4 * packet[server]);
    EXPECT_EQ(stats.pull_bytes_encoded, packet[server]);
  }
}

// Hands the messages of one server and its workers over one by one.
class ServerMessages : public testing::Test {
 protected:
  std::vector<OutgoingMessage> step(ServerCluster& cluster, uint32_t rank, uint64_t number) {
    buckets_.push_back(cluster.gradient(rank, number));
    EXPECT_TRUE(cluster.rank(rank).start(buckets_.back(), number).ok());
    return cluster.rank(rank).take_outgoing();
  }
  // A worker's push, which its only server takes.
  void push(ServerCluster& cluster, uint32_t worker, uint64_t number) {
    const std::vector<OutgoingMessage> messages = step(cluster, worker, number);
    EXPECT_TRUE(cluster.rank(messages[0].peer).receive(worker, messages[0].bytes).ok());
  }

  std::deque<std::vector<float>> buckets_;
};

TEST_F(ServerMessages, AVersionIsEncodedOnceAndItsBytesAreSharedAndKept) {
  ServerCluster cluster({.workers = 3});
  step(cluster, 3, 0);
  for (uint32_t worker = 0; worker < 3; ++worker) {
    const auto push = step(cluster, worker, 0);
    ASSERT_TRUE(cluster.rank(3).receive(worker, push[0].bytes).ok());
  }
  const std::vector<OutgoingMessage> pulls = cluster.rank(3).take_outgoing();
  ASSERT_EQ(pulls.size(), 3u);
  for (const OutgoingMessage& pull : pulls) {
    EXPECT_EQ(pull.keep, pulls[0].keep);
    EXPECT_EQ(pull.bytes.data(), pulls[0].bytes.data());
  }
  const std::vector<std::byte> before(pulls[2].bytes.begin(), pulls[2].bytes.end());
  step(cluster, 3, 1);
  EXPECT_TRUE(std::ranges::equal(before, pulls[2].bytes));
}

TEST_F(ServerMessages, ALateWorkerGetsTheNewestVersionFirstAndGoesOnWithAll) {
  ServerCluster cluster(
      {.workers = 3, .codec = "raw", .options = {.backup = 1}, .rate = -1.0f, .momentum = 0.0f});
  ServerSide& server = cluster.server_side(3);
  for (uint64_t version = 0; version < 3; ++version) {
    step(cluster, 3, version);
    for (uint32_t worker : {1u, 0u}) {
      const auto push = step(cluster, worker, version);
      ASSERT_TRUE(server.receive(worker, push[0].bytes).ok());
    }
    for (const OutgoingMessage& pull : server.take_outgoing()) {
      ASSERT_NE(pull.peer, 2u);
      ASSERT_TRUE(cluster.rank(pull.peer).receive(3, pull.bytes).ok());
    }
    if (version > 0) continue;
    const std::vector<float> a = cluster.gradient(0, 0);
    const std::vector<float> b = cluster.gradient(1, 0);
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(cluster.worker_model(0)[i], (a[i] + b[i]) / 2);  // the mean of the pushes that came
    }
  }
  step(cluster, 3, 3);
  const auto late = step(cluster, 2, 0);
  ASSERT_TRUE(server.receive(2, late[0].bytes).ok());
  EXPECT_EQ(server.dropped_pushes(), (std::vector<uint64_t>{0, 0, 1}));
  const std::vector<OutgoingMessage> pulls = server.take_outgoing();
  ASSERT_EQ(pulls.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(parse_packet(pulls[i].bytes).value().header.step, 2 - i);
    EXPECT_FALSE(cluster.rank(2).done());
    ASSERT_TRUE(cluster.rank(2).receive(3, pulls[i].bytes).ok());
  }
  EXPECT_TRUE(cluster.rank(2).done());
  EXPECT_EQ(cluster.version(2, 3), 3u);
  EXPECT_TRUE(same_bits(cluster.worker_model(2), cluster.worker_model(0)));
  // Its next push is for the version under way.
  EXPECT_EQ(parse_packet(step(cluster, 2, 1)[0].bytes).value().header.step, 3u);
}

TEST_F(ServerMessages, AVersionWaitsForNoWorkerThatIsLost) {
  ServerCluster cluster({.workers = 3, .codec = "raw", .rate = -1.0f, .momentum = 0.0f});
  ServerSide& server = cluster.server_side(3);
  const auto pull = [&](std::vector<uint32_t> expected) {
    std::vector<uint32_t> peers;
    for (const OutgoingMessage& message : server.take_outgoing()) {
      peers.push_back(message.peer);
      EXPECT_TRUE(cluster.rank(message.peer).receive(3, message.bytes).ok());
    }
    EXPECT_EQ(peers, expected);
  };
  // The last push of the version was missing.
  step(cluster, 3, 0);
  push(cluster, 0, 0);
  push(cluster, 1, 0);
  EXPECT_FALSE(server.done());
  ASSERT_TRUE(server.lose(2).ok());
  EXPECT_TRUE(server.done());
  pull({0, 1});
  // A push that has arrived counts, although its worker is lost.
  step(cluster, 3, 1);
  push(cluster, 1, 1);
  ASSERT_TRUE(server.lose(1).ok());
  EXPECT_EQ(server.awaiting(), std::vector<uint32_t>{0});
  EXPECT_FALSE(server.done());
  push(cluster, 0, 1);
  pull({0});
  step(cluster, 3, 2);
  push(cluster, 0, 2);
  pull({0});
  std::vector<float> model(cluster.layout().numel());
  for (uint64_t version = 0; version < 3; ++version) {
    const std::vector<float> a = cluster.gradient(0, version);
    const std::vector<float> b = cluster.gradient(1, version);
    for (size_t i = 0; i < model.size(); ++i) model[i] += version < 2 ? (a[i] + b[i]) / 2 : a[i];
  }
  EXPECT_TRUE(same_bits(cluster.worker_model(0), model));
  // No version is finished by nobody.
  step(cluster, 3, 3);
  ASSERT_TRUE(server.lose(0).ok());
  EXPECT_FALSE(server.done());
  EXPECT_EQ(server.lose(3).message(), "rank 3 is no worker");
}

TEST_F(ServerMessages, AProcessTakesThePlaceOfALostWorker) {
  ServerCluster cluster({.workers = 3, .codec = "raw", .rate = -1.0f, .momentum = 0.0f});
  ServerSide& server = cluster.server_side(3);
  std::vector<float> model;  // of the worker that joins
  std::vector<float> bucket(cluster.layout().numel());
  const std::unique_ptr<WorkerSide> joiner =
      make_server_worker(std::make_shared<const Layout>(cluster.layout()), 2,
                         Execution::create().value(), {},
                         [&](uint32_t, uint64_t, std::span<const float> delta) {
                           for (size_t i = 0; i < model.size(); ++i) model[i] += delta[i];
                           return Status();
                         })
          .value();
  const auto pull = [&](std::vector<uint32_t> expected) {
    std::vector<uint32_t> peers;
    for (const OutgoingMessage& message : server.take_outgoing()) {
      peers.push_back(message.peer);
      Exchange& rank = message.peer == 2 && !model.empty() ? *joiner : cluster.rank(message.peer);
      EXPECT_TRUE(rank.receive(3, message.bytes).ok());
    }
    EXPECT_EQ(peers, expected);
  };
  EXPECT_EQ(server.join(2, 0).message(), "rank 2 can't join: it takes part already");
  EXPECT_EQ(server.join(3, 0).message(), "rank 3 can't join: it is no worker");
  step(cluster, 3, 0);
  for (uint32_t worker : {0u, 1u, 2u}) push(cluster, worker, 0);
  pull({0, 1, 2});
  step(cluster, 3, 1);
  push(cluster, 0, 1);
  push(cluster, 2, 1);
  EXPECT_EQ(server.pushed(), (std::vector<uint32_t>{0, 2}));
  ASSERT_TRUE(server.lose(2).ok());
  EXPECT_EQ(server.pushed(), (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(server.join(2, 1).code(), StatusCode::kUnexpectedMessage);
  push(cluster, 1, 1);
  pull({0, 1});
  EXPECT_EQ(server.join(2, 1).message(), "rank 2 can't join: version 1 is finished");

  // It gets the model of version 2, and first pushes for version 3.
  ASSERT_TRUE(server.join(2, 2).ok());
  model = cluster.worker_model(0);
  ASSERT_TRUE(joiner->set_version(3, 2).ok());
  EXPECT_EQ(joiner->join(3, 1, bucket).message(), "rank 3 takes no first push of version 1");
  EXPECT_EQ(joiner->join(2, 2, bucket).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(joiner->join(3, 3, {}).code(), StatusCode::kLengthMismatch);
  step(cluster, 3, 2);
  push(cluster, 0, 2);
  push(cluster, 1, 2);
  EXPECT_EQ(server.awaiting(), std::vector<uint32_t>{2});
  ASSERT_TRUE(joiner->join(3, 3, bucket).ok());
  EXPECT_EQ(joiner->awaiting(), std::vector<uint32_t>{3});
  ASSERT_TRUE(server.join(2, 3).ok());
  EXPECT_TRUE(server.done());
  pull({0, 1, 2});
  EXPECT_TRUE(joiner->done());
  EXPECT_TRUE(same_bits(model, cluster.worker_model(0)));

  step(cluster, 3, 3);
  push(cluster, 0, 3);
  push(cluster, 1, 3);
  EXPECT_EQ(server.awaiting(), std::vector<uint32_t>{2});
  bucket = cluster.gradient(2, 3);
  ASSERT_TRUE(joiner->start(bucket, 0).ok());
  EXPECT_EQ(joiner->join(3, 4, bucket).code(), StatusCode::kUnexpectedMessage);
  ASSERT_TRUE(server.receive(2, joiner->take_outgoing().at(0).bytes).ok());
  EXPECT_EQ(server.join(2, 4).message(), "rank 2 can't join: it takes part already");
  const std::vector<float> before = model;
  pull({0, 1, 2});
  EXPECT_TRUE(same_bits(model, cluster.worker_model(0)));
  const std::vector<float> a = cluster.gradient(0, 3);
  const std::vector<float> b = cluster.gradient(1, 3);
  const std::vector<float> c = cluster.gradient(2, 3);
  for (size_t i = 0; i < model.size(); ++i) {
    ASSERT_NEAR(model[i] - before[i], (a[i] + b[i] + c[i]) / 3, 1e-5f);
  }
}

TEST_F(ServerMessages, WhatNoPlaceIsForIsRefused) {
  ServerCluster cluster({.workers = 2});
  ServerSide& server = cluster.server_side(2);
  EXPECT_TRUE(server.awaits_any());
  EXPECT_EQ(server.listening(), (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(cluster.rank(0).listening(), std::vector<uint32_t>{2});
  EXPECT_EQ(server.start(buckets_.emplace_back(cluster.layout().numel()), 7).code(),
            StatusCode::kInvalidArgument);
  step(cluster, 2, 0);
  EXPECT_EQ(server.awaiting(), (std::vector<uint32_t>{0, 1}));
  const auto first = step(cluster, 0, 0);
  ASSERT_TRUE(server.receive(0, first[0].bytes).ok());
  EXPECT_EQ(server.awaiting(), std::vector<uint32_t>{1});
  const Status twice = server.receive(0, first[0].bytes);
  EXPECT_NE(twice.message().find("rank 0 sent its push of version 0 twice"), std::string::npos);
  EXPECT_EQ(server.receive(1, first[0].bytes).code(), StatusCode::kUnexpectedMessage);
  EXPECT_EQ(server.receive(2, first[0].bytes).code(), StatusCode::kUnexpectedMessage);
  EXPECT_EQ(cluster.rank(1).receive(0, first[0].bytes).code(), StatusCode::kUnexpectedMessage);
  const auto second = step(cluster, 1, 0);
  ASSERT_TRUE(server.receive(1, second[0].bytes).ok());
  ASSERT_TRUE(server.done());
  // A push for an older version is an error without backup workers.
  const Status late = server.receive(1, second[0].bytes);
  EXPECT_NE(late.message().find("but version 1 is under way"), std::string::npos);
  const std::vector<OutgoingMessage> pulls = server.take_outgoing();
  ASSERT_TRUE(cluster.rank(0).receive(2, pulls[0].bytes).ok());
  EXPECT_TRUE(cluster.rank(0).done());
  EXPECT_NE(cluster.rank(0).receive(2, pulls[0].bytes).message().find("version 0 twice"),
            std::string::npos);
  // So is a push for a version that the server has not sent yet.
  ServerCluster ahead({.workers = 2, .first_version = 3});
  step(cluster, 2, 1);
  const auto push = step(ahead, 1, 0);
  EXPECT_NE(server.receive(1, push[0].bytes).message().find("may be 0 ahead"), std::string::npos);
}

TEST(Server, GoesOnFromAnyVersion) {
  ServerCluster cluster({.workers = 2, .servers = 2, .versions = 3, .first_version = 100});
  ASSERT_TRUE(cluster.run({.seed = 1, .next = {}, .stalled = {}}).ok());
  for (uint32_t rank = 0; rank < 2; ++rank) EXPECT_EQ(cluster.version(rank, 3), 103u);
  EXPECT_EQ(cluster.worker(0).set_version(2, 0).code(), StatusCode::kUnexpectedMessage);
  EXPECT_EQ(cluster.worker(0).set_version(1, 0).code(), StatusCode::kInvalidArgument);
}

TEST(Server, AnUpdateThatFailsOrIsNotFiniteEndsTheRun) {
  ServerCluster cluster({.workers = 2, .rate = std::numeric_limits<float>::infinity()});
  const Status status = cluster.run({.seed = 1, .next = {}, .stalled = {}});
  EXPECT_EQ(status.code(), StatusCode::kNonFinite);
  EXPECT_NE(status.message().find("the update of version 0 on rank 2"), std::string::npos);
}

TEST(Server, SetupsThatDifferOrCantWorkAreNamed) {
  ServerCluster a({.workers = 2});
  ServerCluster b({.workers = 2, .options = {.backup = 1}});
  EXPECT_TRUE(a.rank(0).check_peer(2, a.rank(2).describe()).ok());
  const Status differ = a.rank(0).check_peer(2, b.rank(2).describe());
  EXPECT_NE(differ.message().find("backup workers 1"), std::string::npos) << differ.message();

  const auto layout = std::make_shared<const Layout>(a.layout());
  const auto worker = [&](uint32_t rank, const ServerOptions& options) {
    return make_server_worker(layout, rank, Execution::create().value(), options, {}).status();
  };
  EXPECT_TRUE(worker(1, {}).ok());
  EXPECT_EQ(worker(2, {}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(worker(1, {.backup = 2}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(worker(1, {.staleness = 64}).code(), StatusCode::kInvalidArgument);
  const auto message = [&](const char* exchange, uint32_t rank, ExchangeOptions of_rank) {
    const Status status =
        make_exchange(exchange, layout, rank, Execution::create().value(), std::move(of_rank))
            .status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << exchange;
    return status.message();
  };
  const ShardUpdate update = [](std::span<float>) { return Status(); };
  const ApplyDelta apply = [](uint32_t, uint64_t, std::span<const float>) { return Status(); };
  EXPECT_EQ(message("server", 1, {.update = update}), "worker rank 1: only servers take an update");
  EXPECT_EQ(message("server", 2, {.apply = apply}),
            "server rank 2: only workers apply what they pull");
  EXPECT_EQ(message("server", 3, {}), "rank 3 is no server; those are ranks 2 to 2");
  EXPECT_EQ(message("ring", 1, {}), "a layout with servers is for the server exchange alone");
  EXPECT_EQ(message("ring", 1, {.apply = apply}),
            "the ring exchange has no workers that apply updates");
}

TEST(Server, ItsTextHoldsItsOptions) {
  const auto parsed = [](const std::string& text) { return ExchangeChoice::parse(text); };
  const ServerOptions all = {.pulls = ServerOptions::Pulls::kGradients,
                             .backup = 1,
                             .turns = ServerOptions::Turns::kAny,
                             .staleness = 2,
                             .history = 3,
                             .behind = ServerOptions::Behind::kReport};
  const std::string text =
      "server:pulls=gradients,backup=1,turns=any,staleness=2,history=3,behind=report";
  EXPECT_EQ(all.text(), text);
  const ServerOptions again = parsed(text).value().server();
  EXPECT_EQ(again.pulls, all.pulls);
  EXPECT_EQ(again.backup, 1u);
  EXPECT_EQ(again.turns, all.turns);
  EXPECT_EQ(again.staleness, 2u);
  EXPECT_EQ(again.history, 3u);
  EXPECT_EQ(again.behind, all.behind);
  EXPECT_EQ(parsed("server:pulls=updates,history=64").value().text(), "server");
  for (const char* bad :
       {"server:pulls=all", "server:backup=-1", "server:turns=each", "server:ranks=2",
        "server:backup", "hierarchical:between=server", "hierarchical:within=server"}) {
    EXPECT_EQ(parsed(bad).status().code(), StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace gradwire
