// Versions that count further pushes of a worker, in the turns of workers that are behind.

#include <deque>
#include <limits>

#include "gtest/gtest.h"

#include "frame/packet.h"
#include "tests/exchange/server_cluster.h"

namespace gradwire {
namespace {

constexpr ServerOptions kAnyTurns = {.backup = 1, .turns = ServerOptions::Turns::kAny};

// Hands the messages of one server and its workers over one by one. The last worker sleeps: it has
// computed its first gradient, and its push is late.
class ServerTurns : public testing::Test {
 protected:
  explicit ServerTurns(ServerSetup setup = {.workers = 4,
                                            .codec = "raw",
                                            .options = kAnyTurns,
                                            .rate = -1.0f,
                                            .momentum = 0.0f})
      : cluster_(setup), server_(cluster_.server_side(setup.workers)), rank_(setup.workers) {}

  // The push of the worker's n-th gradient; empty if it sends none.
  std::vector<OutgoingMessage> step(uint32_t rank, uint64_t n) {
    buckets_.push_back(cluster_.gradient(rank, n));
    EXPECT_TRUE(cluster_.rank(rank).start(buckets_.back(), n).ok());
    return cluster_.rank(rank).take_outgoing();
  }
  Status push(uint32_t worker, uint64_t n) {
    const std::vector<OutgoingMessage> messages = step(worker, n);
    return server_.receive(worker, messages.at(0).bytes);
  }
  // Delivers what the server sends; returns the ranks to which it goes.
  std::vector<uint32_t> deliver() {
    std::vector<uint32_t> peers;
    for (const OutgoingMessage& message : server_.take_outgoing()) {
      peers.push_back(message.peer);
      EXPECT_TRUE(cluster_.rank(message.peer).receive(rank_, message.bytes).ok());
    }
    return peers;
  }
  void begin() { step(rank_, server_.version()); }
  // Version 0, made by all but the worker that sleeps.
  void make_first_version() {
    begin();
    for (uint32_t worker = 0; worker + 1 < rank_; ++worker) EXPECT_TRUE(push(worker, 0).ok());
    EXPECT_TRUE(server_.done());
    EXPECT_EQ(deliver().size(), rank_ - 1);
  }

  ServerCluster cluster_;
  ServerSide& server_;
  uint32_t rank_;  // the server's
  std::deque<std::vector<float>> buckets_;
};

TEST_F(ServerTurns, TheFirstPushesCountWhoeverSentThem) {
  const std::vector<OutgoingMessage> late = step(3, 0);
  make_first_version();
  const std::vector<float> before = cluster_.worker_model(0);
  begin();
  ASSERT_TRUE(push(0, 1).ok());
  EXPECT_FALSE(cluster_.rank(0).done());
  ASSERT_EQ(deliver(), std::vector<uint32_t>{0});  // the turn of worker 3
  EXPECT_TRUE(cluster_.rank(0).done());
  EXPECT_EQ(cluster_.worker(0).next_version(), 1u);
  EXPECT_EQ(server_.awaiting(), (std::vector<uint32_t>{0, 1, 2, 3}));
  ASSERT_TRUE(push(0, 2).ok());
  EXPECT_EQ(server_.awaiting(), (std::vector<uint32_t>{1, 2, 3}));
  EXPECT_FALSE(server_.done());
  ASSERT_TRUE(push(1, 1).ok());
  ASSERT_TRUE(server_.done());
  // First pushes, then the others, whatever the order in which they came.
  const std::vector<float> a = cluster_.gradient(0, 1);
  const std::vector<float> b = cluster_.gradient(1, 1);
  const std::vector<float> again = cluster_.gradient(0, 2);
  std::vector<float> expected(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    const float average = ((a[i] + b[i]) + again[i]) / 3.0f;
    const float change = (before[i] + average) - before[i];  // as the cluster's SGD rounds it
    expected[i] = before[i] + change;
  }
  EXPECT_EQ(deliver(), (std::vector<uint32_t>{0, 1}));
  EXPECT_TRUE(same_bits(cluster_.worker_model(0), expected));

  // The others were too slow, are told so, and get what they lack.
  begin();
  ASSERT_TRUE(push(2, 1).ok());
  ASSERT_TRUE(server_.receive(3, late[0].bytes).ok());
  EXPECT_EQ(server_.dropped_pushes(), (std::vector<uint64_t>{0, 0, 1, 1}));
  EXPECT_EQ(deliver(), (std::vector<uint32_t>{2, 3, 3}));
  for (uint32_t worker : {2u, 3u}) {
    EXPECT_EQ(cluster_.worker(worker).next_version(), 2u);
    EXPECT_TRUE(same_bits(cluster_.worker_model(worker), cluster_.worker_model(0)));
  }
  // Nobody is behind now, so nobody has a second turn.
  ASSERT_TRUE(push(0, 3).ok());
  EXPECT_TRUE(server_.take_outgoing().empty());
}

TEST_F(ServerTurns, ATurnIsGivenOnceAndIsNeeded) {
  make_first_version();
  begin();
  const std::vector<OutgoingMessage> messages = step(0, 1);
  ASSERT_TRUE(server_.receive(0, messages[0].bytes).ok());
  EXPECT_EQ(deliver(), std::vector<uint32_t>{0});
  const std::vector<OutgoingMessage> other = step(1, 1);
  ASSERT_TRUE(server_.receive(1, other.at(0).bytes).ok());
  EXPECT_TRUE(server_.take_outgoing().empty());  // the only turn is taken
  EXPECT_FALSE(cluster_.rank(1).done());
  const Status twice = server_.receive(1, other.at(0).bytes);
  EXPECT_NE(twice.message().find("rank 1 sent its push of version 1 twice"), std::string::npos);
}

TEST_F(ServerTurns, APushInASecondTurnMayBeLateAsWell) {
  make_first_version();
  begin();
  ASSERT_TRUE(push(0, 1).ok());
  EXPECT_EQ(deliver(), std::vector<uint32_t>{0});
  ASSERT_TRUE(push(1, 1).ok());
  ASSERT_TRUE(push(2, 1).ok());
  ASSERT_TRUE(server_.done());
  const std::vector<OutgoingMessage> pulls = server_.take_outgoing();
  ASSERT_EQ(pulls.size(), 3u);
  const std::vector<OutgoingMessage> late = step(0, 2);  // before its pull arrives
  EXPECT_EQ(parse_packet(late.at(0).bytes).value().header.step, 1u);
  EXPECT_FALSE(cluster_.rank(0).done());
  for (const OutgoingMessage& pull : pulls) {
    ASSERT_TRUE(cluster_.rank(pull.peer).receive(rank_, pull.bytes).ok());
  }
  EXPECT_TRUE(cluster_.rank(0).done());
  begin();
  ASSERT_TRUE(server_.receive(0, late[0].bytes).ok());
  EXPECT_EQ(server_.dropped_pushes(), (std::vector<uint64_t>{1, 0, 0, 0}));
  EXPECT_TRUE(server_.take_outgoing().empty());
  EXPECT_EQ(cluster_.worker(0).next_version(), 2u);
}

// One packet out of its place, or not empty, is refused; a late one is not.
TEST_F(ServerTurns, ATurnThatIsNotDueIsRefused) {
  make_first_version();
  begin();
  ASSERT_TRUE(push(0, 1).ok());
  const std::vector<OutgoingMessage> turn = server_.take_outgoing();
  ASSERT_EQ(turn.size(), 1u);
  EXPECT_EQ(turn[0].bytes.size(), kPacketHeaderSize);
  EXPECT_NE(cluster_.rank(1).receive(rank_, turn[0].bytes).message().find("none is due"),
            std::string::npos);
  ASSERT_TRUE(cluster_.rank(0).receive(rank_, turn[0].bytes).ok());
  EXPECT_EQ(cluster_.rank(0).receive(rank_, turn[0].bytes).code(), StatusCode::kUnexpectedMessage);
  EXPECT_EQ(server_.receive(1, turn[0].bytes).code(), StatusCode::kUnexpectedMessage);
  ASSERT_TRUE(push(1, 1).ok());
  ASSERT_TRUE(push(2, 1).ok());
  EXPECT_EQ(deliver(), (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_TRUE(cluster_.rank(0).receive(rank_, turn[0].bytes).ok());
  EXPECT_EQ(cluster_.worker(0).next_version(), 2u);
}

class ServerTurnsWithResiduals : public ServerTurns {
 protected:
  ServerTurnsWithResiduals()
      : ServerTurns({.workers = 2,
                     .codec = "3lc:s=1.75",
                     .options = kAnyTurns,
                     .rate = -1.0f,
                     .momentum = 0.0f}) {}
};

TEST_F(ServerTurnsWithResiduals, ASkippedVersionIsOwedAgainWithAllThatWasPushedForIt) {
  make_first_version();  // by worker 0 alone
  begin();
  const std::vector<double> before = cluster_.owed(Direction::kPush);
  cluster_.spoil = [](uint32_t rank, uint64_t, std::vector<float>& gradient) {
    if (rank == 1) gradient[12300] = std::numeric_limits<float>::quiet_NaN();
  };
  // Worker 1 has a push of a version that is finished; the server answers with the version.
  ASSERT_TRUE(push(1, 0).ok());
  EXPECT_EQ(deliver(), std::vector<uint32_t>{1});
  ASSERT_TRUE(push(1, 1).ok());  // one push of two workers is enough
  ASSERT_TRUE(server_.done());
  EXPECT_EQ(deliver(), std::vector<uint32_t>{1});
  EXPECT_EQ(cluster_.rank(1).non_finite()->element, 12u);
  EXPECT_EQ(cluster_.owed(Direction::kPush), before);
}

class ServerTurnsOfThree : public ServerTurns {
 protected:
  ServerTurnsOfThree()
      : ServerTurns({.workers = 3,
                     .codec = "3lc:s=1.75",
                     .options = kAnyTurns,
                     .rate = -1.0f,
                     .momentum = 0.0f}) {}
};

TEST_F(ServerTurnsOfThree, BothPushesOfASkippedVersionAreOwedAgain) {
  make_first_version();
  const std::vector<double> before = cluster_.owed(Direction::kPush);
  begin();
  ASSERT_TRUE(push(0, 1).ok());
  const std::vector<OutgoingMessage> turn = server_.take_outgoing();
  ASSERT_EQ(turn.size(), 1u);
  ASSERT_TRUE(cluster_.rank(0).receive(rank_, turn[0].bytes).ok());
  const std::vector<OutgoingMessage> again = step(0, 2);
  cluster_.spoil = [](uint32_t, uint64_t, std::vector<float>& gradient) {
    gradient[12300] = std::numeric_limits<float>::quiet_NaN();
  };
  ASSERT_TRUE(push(1, 1).ok());
  ASSERT_TRUE(server_.done());
  for (const OutgoingMessage& pull : server_.take_outgoing()) {
    ASSERT_TRUE(cluster_.rank(pull.peer).receive(rank_, pull.bytes).ok());
  }
  cluster_.spoil = {};
  // What worker 0 had sent of both gradients is in its residual: nothing of it was applied.
  const std::vector<double> owed = cluster_.owed(Direction::kPush);
  const std::vector<float> first = cluster_.gradient(0, 1);
  const std::vector<float> second = cluster_.gradient(0, 2);
  for (const Segment& s : cluster_.layout().segments()) {
    if (s.push_codec->residual_type() == ResidualType::kNone) continue;
    for (uint64_t i = s.bucket_offset; i < s.bucket_offset + s.n; ++i) {
      ASSERT_NEAR(owed[i], before[i] + (double{first[i]} + second[i]) / 3, 1e-5) << i;
    }
  }
}

// With turns=own two workers could not make a version of three pushes, while two sleep.
TEST(ServerTurnsOfAll, ReplicasAreEqualWhateverTheOrderAndWhoeverSleeps) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    ServerCluster cluster({.workers = 4, .servers = 2, .options = kAnyTurns, .versions = 24});
    uint64_t meanwhile = 0;  // versions that were finished while worker 2 slept
    const auto stalled = [&](uint32_t rank, uint64_t tick) {
      if (rank == 2) meanwhile = std::max(meanwhile, cluster.version(0, 4) - cluster.version(2, 4));
      return (rank == 3 && tick > 20 && tick < 900) || (rank == 2 && tick > 100 && tick < 900);
    };
    const Status status = cluster.run({.seed = seed, .next = {}, .stalled = stalled});
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_GE(meanwhile, 5u) << seed;
    EXPECT_FALSE(cluster.replicas_differed());
    for (uint32_t worker = 0; worker < 4; ++worker) {
      for (uint32_t server : {4u, 5u}) EXPECT_GE(cluster.version(worker, server), 24u);
    }
  }
}

TEST(ServerTurnsOfAll, NeedBackupWorkersAndNoStaleness) {
  const auto layout = std::make_shared<const Layout>(
      Layout::create({{"w", {30, 10}}}, 3, {.codec = "3lc", .servers = 1}).value());
  for (const char* text : {"server:turns=any", "server:turns=any,backup=1,staleness=1"}) {
    const Status status = make_exchange(text, layout, 0, Execution::create().value(), {}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find("backup must be at least 1"), std::string::npos);
  }
  EXPECT_TRUE(
      make_exchange("server:turns=any,backup=1", layout, 0, Execution::create().value(), {}).ok());
}

TEST(ServerTurnsOfAll, AStepThatHoldsBackIsCounted) {
  const auto layout = std::make_shared<const Layout>(
      Layout::create({{"w", {30, 10}}}, 4, {.servers = 2, .owner = 3}).value());
  const auto worker = make_server_worker(layout, 0, Execution::create().value(), {}, {}).value();
  ASSERT_TRUE(worker->hold_back().ok());
  EXPECT_EQ(worker->dropped_pushes(), (std::vector<uint64_t>{0, 0, 0, 1}));
  EXPECT_EQ(worker->take_outgoing().at(0).peer, 3u);
  EXPECT_TRUE(worker->done());
  EXPECT_EQ(worker->next_version(), 0u);
}

}  // namespace
}  // namespace gradwire
