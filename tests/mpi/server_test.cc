// Workers and servers over MPI, which go on at their own pace.

#include <chrono>
#include <functional>
#include <thread>

#include "gtest/gtest.h"

#include "engines/loopback/loopback.h"
#include "tests/mpi/ranks.h"
#include "tests/mpi/server_ranks.h"

namespace gradwire::mpi {
namespace {

constexpr auto kNap = std::chrono::milliseconds(400);

struct Plan {
  uint32_t servers = 1;
  std::string codec = "3lc";
  ServerOptions options = {};
  uint64_t versions = 8;
};

// This rank's part of a training. A worker calls before_step(n) before its n-th step.
class Training {
 public:
  explicit Training(const Plan& plan)
      : versions_(plan.versions),
        rank_(my_rank(), world_size(), plan.servers, plan.codec, plan.options),
        engine_(Engine::create(MPI_COMM_WORLD, rank_.take_exchange(), 20).value()) {}

  Status run(const std::function<void(uint64_t)>& before_step = {}) {
    const Status status = rank_.is_server() ? serve() : work(before_step);
    return status.ok() ? engine_.leave() : status;
  }

  ServerRank& rank() { return rank_; }
  Engine& engine() { return engine_; }
  uint64_t steps() const { return steps_; }

 private:
  Status serve() {
    for (uint64_t version = 0; !engine_.over(); ++version) {
      Status status = engine_.start(rank_.bucket(), version);
      if (status.ok()) status = engine_.wait();
      if (!status.ok()) return status;
    }
    return {};
  }
  Status work(const std::function<void(uint64_t)>& before_step) {
    while (rank_.version() < versions_ && !engine_.over()) {
      if (before_step) before_step(steps_);
      Status status = engine_.start(rank_.gradient(), steps_++);
      if (status.ok()) status = engine_.wait();
      if (!status.ok()) return status;
    }
    return {};
  }

  uint64_t versions_;
  ServerRank rank_;
  Engine engine_;
  uint64_t steps_ = 0;
};

// The workers' final model, from a training in one process.
std::vector<float> train_in_one_process(const Plan& plan) {
  std::vector<std::unique_ptr<ServerRank>> ranks;
  std::vector<Exchange*> exchanges;
  for (uint32_t r = 0; r < world_size(); ++r) {
    ranks.push_back(
        std::make_unique<ServerRank>(r, world_size(), plan.servers, plan.codec, plan.options));
    exchanges.push_back(&ranks.back()->exchange());
  }
  std::vector<uint64_t> steps(world_size());
  LoopbackRun run;
  run.next = [&](uint32_t r) -> std::optional<LoopbackStep> {
    ServerRank& rank = *ranks[r];
    if (rank.is_server()) return LoopbackStep{rank.bucket(), rank.version()};
    if (rank.version() >= plan.versions) return std::nullopt;
    return LoopbackStep{rank.gradient(), steps[r]++};
  };
  const Status status = run_loopback(exchanges, run);
  EXPECT_TRUE(status.ok()) << status.message();
  return ranks[0]->model();
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool is_worker(const Plan& plan) { return my_rank() < world_size() - plan.servers; }

// Every worker's model is that of worker 0.
void expect_equal_replicas(Training& training, const Plan& plan) {
  std::vector<float> first = training.rank().model();
  MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
  if (is_worker(plan)) {
    EXPECT_TRUE(same_bits(training.rank().model(), first));
  }
}

TEST(Server, EndsWithTheBitsOfOneProcess) {
  for (uint32_t servers : {1u, 2u}) {
    for (const char* codec : {"raw", "3lc", "qsgd"}) {
      const Plan plan{.servers = servers, .codec = codec};
      Training training(plan);
      const Status status = training.run();
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(training.rank().version(), plan.versions);
      if (!is_worker(plan)) continue;
      EXPECT_EQ(training.steps(), plan.versions);
      EXPECT_TRUE(same_bits(training.rank().model(), train_in_one_process(plan))) << codec;
    }
  }
}

TEST(Server, GoesOnWithoutAWorkerThatSleepsAndCountsWhatItDropped) {
  const Plan plan{.codec = "raw", .options = {.backup = 1}, .versions = 20};
  const uint32_t sleeper = world_size() - 2;
  Training training(plan);
  const auto started = std::chrono::steady_clock::now();
  const Status status = training.run([&](uint64_t step) {
    int word = 0;
    if (my_rank() == sleeper && step == 1) {
      for (int worker = 0; worker < static_cast<int>(sleeper); ++worker) {
        MPI_Send(&word, 1, MPI_INT, worker, 0, MPI_COMM_WORLD);
      }
      std::this_thread::sleep_for(kNap);
    } else if (my_rank() < sleeper && step == 2) {  // so that it sleeps before the end
      MPI_Recv(&word, 1, MPI_INT, static_cast<int>(sleeper), 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
  });
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(training.rank().version(), plan.versions);
  if (is_worker(plan)) {
    if (my_rank() == sleeper) {
      EXPECT_LT(training.steps(), plan.versions);  // it caught up at once
    }
  } else {
    EXPECT_GT(training.rank().server_side().dropped_pushes()[sleeper], 0u);
  }
  EXPECT_GE(std::chrono::steady_clock::now() - started, kNap);
  expect_equal_replicas(training, plan);
}

TEST(Server, StaleWorkersEndWithTheSameVersions) {
  const Plan plan{.servers = 2, .options = {.staleness = 2}, .versions = 12};
  Training training(plan);
  uint64_t furthest = 0;
  const Status status = training.run([&](uint64_t step) {
    furthest = std::max(furthest, step - training.rank().version());
    // Worker 0 is slow, so that the others run ahead.
    if (my_rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  });
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_LE(furthest, 2u);
  if (is_worker(plan) && my_rank() != 0) {
    EXPECT_GT(furthest, 0u);
  }
  // Some workers took a step more than others; all have received every finished version.
  uint64_t version = training.rank().version();
  MPI_Bcast(&version, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
  if (is_worker(plan)) {
    EXPECT_EQ(training.rank().version(), version);
  }
  EXPECT_GE(version, plan.versions);
  expect_equal_replicas(training, plan);
}

TEST(Server, EndsWhenTooFewWorkersAreLeft) {
  const Plan plan{.versions = my_rank() == 0 ? uint64_t{3} : uint64_t{1000}};
  Training training(plan);
  const Status status = training.run();
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(training.rank().version(), 3u);
  EXPECT_EQ(training.engine().over(), my_rank() != 0);
  std::vector<float> bucket(training.rank().bucket().size());
  EXPECT_EQ(training.engine().start(bucket, 3).code(), StatusCode::kUnexpectedMessage);
  EXPECT_TRUE(training.engine().leave().ok());
  expect_equal_replicas(training, plan);
}

TEST(Server, PlansThatDifferAreNamed) {
  Training training({.options = {.backup = my_rank() == 1 ? 1u : 0u}});
  const Status status = training.run();
  EXPECT_EQ(status.code(), StatusCode::kPeerMismatch);
  EXPECT_TRUE(contains(status.message(), "backup workers 1")) << status.message();
}

}  // namespace
}  // namespace gradwire::mpi
