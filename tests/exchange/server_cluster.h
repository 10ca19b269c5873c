#pragma once

// Workers and servers of one model in one process.

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engines/loopback/loopback.h"
#include "gradwire/server.h"
#include "tests/exchange/cluster.h"
#include "tests/exchange/server_sides.h"

namespace gradwire {

struct ServerSetup {
  uint32_t workers = 2;
  uint32_t servers = 1;
  std::string codec = "3lc";
  ServerOptions options = {};
  uint64_t versions = 4;  // the version to which every worker trains
  uint64_t first_version = 0;
  float rate = 0.1f;  // learning rate of the servers' SGD with momentum
  float momentum = 0.9f;
};

inline std::vector<TensorInfo> server_tensors() {
  return {{"a.weight", {64, 64, 3}}, {"a.bias", {64}},        {"b.weight", {100, 47}},
          {"c.weight", {80, 80}},    {"d.weight", {700, 10}}, {"e.weight", {1, 500}}};
}

class ServerCluster {
 public:
  explicit ServerCluster(const ServerSetup& setup) : setup_(setup) {
    LayoutOptions options{.codec = setup.codec};
    options.servers = setup.servers;
    layout_ = std::make_shared<const Layout>(
        Layout::create(server_tensors(), setup.workers + setup.servers, options).value());
    const uint64_t n = layout_->numel();
    models_.assign(layout_->world_size(), std::vector<float>(n));
    buckets_ = velocities_ = models_;
    calls_.resize(layout_->world_size());
    for (uint32_t rank = 0; rank < layout_->world_size(); ++rank) {
      Execution execution = Execution::create().value();
      if (rank < setup.workers) {
        workers_.push_back(make_server_worker(layout_, rank, std::move(execution), setup.options,
                                              [this, rank](uint32_t server, uint64_t version,
                                                           std::span<const float> delta) {
                                                return apply(rank, server, version, delta);
                                              })
                               .value());
        for (uint32_t server = setup.workers; server < layout_->world_size(); ++server) {
          EXPECT_TRUE(workers_.back()->set_version(server, setup.first_version).ok());
        }
        ranks_.push_back(workers_.back().get());
      } else {
        ShardUpdate step = [this, rank](std::span<float> bucket) { return update(rank, bucket); };
        if (setup.options.pulls == ServerOptions::Pulls::kGradients) step = {};
        servers_.push_back(
            make_server(layout_, rank, std::move(execution), setup.options, step).value());
        EXPECT_TRUE(servers_.back()->set_version(setup.first_version).ok());
        ranks_.push_back(servers_.back().get());
      }
    }
  }

  // Runs until every worker has pulled all versions of all servers.
  Status run(LoopbackRun run) {
    run.next = [this](uint32_t rank) -> std::optional<LoopbackStep> {
      if (rank >= setup_.workers) return LoopbackStep{buckets_[rank], version(rank, rank)};
      bool behind = false;
      for (uint32_t server = setup_.workers; server < layout_->world_size(); ++server) {
        behind = behind || version(rank, server) < setup_.first_version + setup_.versions;
        if (on_next) on_next(rank, server);
      }
      if (!behind) return std::nullopt;
      buckets_[rank] = gradient(rank, calls_[rank]);
      return LoopbackStep{buckets_[rank], calls_[rank]++};
    };
    return run_loopback(ranks_, run);
  }

  // The gradient that a worker pushes in its n-th step.
  std::vector<float> gradient(uint32_t rank, uint64_t n) const {
    std::vector<float> values = random_buckets(1, layout_->numel(), 1000 * n + rank)[0];
    if (spoil) spoil(rank, n, values);
    return values;
  }

  const Layout& layout() const { return *layout_; }
  Exchange& rank(uint32_t r) { return *ranks_[r]; }
  WorkerSide& worker(uint32_t rank) { return *workers_[rank]; }
  ServerSide& server_side(uint32_t rank) { return *servers_[rank - setup_.workers]; }
  uint32_t server(uint32_t i) const { return setup_.workers + i; }
  uint64_t version(uint32_t rank, uint32_t server) const {
    return rank < setup_.workers ? workers_[rank]->version(server)
                                 : servers_[rank - setup_.workers]->version();
  }
  uint64_t calls(uint32_t rank) const { return calls_[rank]; }
  const std::vector<float>& worker_model(uint32_t rank) const { return models_[rank]; }

  // The model of all servers together.
  std::vector<float> served_model() const {
    std::vector<float> model(layout_->numel());
    for (const Segment& s : layout_->segments()) {
      std::copy_n(models_[s.owner].begin() + static_cast<ptrdiff_t>(s.bucket_offset), s.n,
                  model.begin() + static_cast<ptrdiff_t>(s.bucket_offset));
    }
    return model;
  }
  // For each value of the bucket: the mean over the workers of the push residuals, or the pull
  // residual.
  std::vector<double> owed(Direction direction) const {
    std::vector<double> sum(layout_->numel());
    for (const auto& exchange : ranks_) {
      for (const ResidualPiece& piece : exchange->export_residuals()) {
        if (piece.direction != direction) continue;
        const double weight = direction == Direction::kPush ? 1.0 / setup_.workers : 1.0;
        const auto segment = std::ranges::find_if(layout_->segments(), [&](const Segment& s) {
          return layout_->tensors()[s.tensor].name == piece.tensor;
        });
        for (size_t i = 0; i < piece.values.size(); ++i) {
          sum[segment->bucket_offset + i] += weight * piece.values[i];
        }
      }
    }
    return sum;
  }

  // Whether any two workers differed in a version of a server's tensors.
  bool replicas_differed() const { return replicas_differed_; }

  std::function<void(uint32_t rank, uint64_t n, std::vector<float>& gradient)> spoil;
  std::function<void(uint32_t rank, uint32_t server)> on_next;  // before a worker's step

 private:
  Status apply(uint32_t rank, uint32_t server, uint64_t version, std::span<const float> delta) {
    std::vector<float> result;
    for (const Segment& s : layout_->segments()) {
      if (s.owner != server) continue;
      for (uint64_t i = s.bucket_offset; i < s.bucket_offset + s.n; ++i) {
        models_[rank][i] += delta[i];
        result.push_back(models_[rank][i]);
      }
    }
    const auto [first, inserted] = replicas_.emplace(std::pair(server, version), result);
    replicas_differed_ = replicas_differed_ || !same_bits(first->second, result);
    return {};
  }

  Status update(uint32_t rank, std::span<float> bucket) {
    for (const Segment& s : layout_->segments()) {
      if (s.owner != rank) continue;
      for (uint64_t i = s.bucket_offset; i < s.bucket_offset + s.n; ++i) {
        velocities_[rank][i] = setup_.momentum * velocities_[rank][i] + bucket[i];
        const float before = models_[rank][i];
        models_[rank][i] -= setup_.rate * velocities_[rank][i];
        bucket[i] = models_[rank][i] - before;
      }
    }
    return {};
  }

  ServerSetup setup_;
  std::shared_ptr<const Layout> layout_;
  std::vector<std::unique_ptr<WorkerSide>> workers_;
  std::vector<std::unique_ptr<ServerSide>> servers_;
  std::vector<Exchange*> ranks_;
  Buckets buckets_;
  Buckets models_;  // of each rank; a server's holds only its own tensors
  Buckets velocities_;
  std::vector<uint64_t> calls_;  // steps that each worker began
  std::map<std::pair<uint32_t, uint64_t>, std::vector<float>> replicas_;
  bool replicas_differed_ = false;
};

}  // namespace gradwire
