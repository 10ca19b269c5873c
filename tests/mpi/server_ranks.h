#pragma once

// Workers and servers of a small model, for tests over MPI. Plain SGD moves the model towards
// targets that differ from worker to worker, so every gradient depends on the worker's model.

#include <algorithm>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/exchange/server_sides.h"

namespace gradwire {

class ServerRank {
 public:
  ServerRank(uint32_t rank, uint32_t world, uint32_t servers, const std::string& codec,
             const ServerOptions& options)
      : rank_(rank) {
    LayoutOptions chosen{.codec = codec};
    chosen.servers = servers;
    layout_ = std::make_shared<const Layout>(
        Layout::create({{"a.weight", {64, 64, 3}}, {"a.bias", {64}}, {"b.weight", {100, 47}}},
                       world, chosen)
            .value());
    bucket_.resize(layout_->numel());
    model_ = target_ = bucket_;
    std::mt19937_64 random(rank);
    std::normal_distribution<float> normal;
    for (float& value : target_) value = normal(random);
    Execution execution = Execution::create().value();
    if (is_server()) {
      auto made = make_server(layout_, rank, std::move(execution), options,
                              [this](std::span<float> bucket) { return update(bucket); })
                      .value();
      server_ = made.get();
      exchange_ = std::move(made);
    } else {
      auto made =
          make_server_worker(layout_, rank, std::move(execution), options,
                             [this](uint32_t server, uint64_t, std::span<const float> delta) {
                               return apply(server, delta);
                             })
              .value();
      worker_ = made.get();
      exchange_ = std::move(made);
    }
    view_ = exchange_.get();
  }

  bool is_server() const { return rank_ >= layout_->workers(); }
  // Gives the exchange to the engine that drives it. The exchange must live as long as this object.
  std::unique_ptr<Exchange> take_exchange() { return std::move(exchange_); }
  Exchange& exchange() { return *view_; }
  ServerSide& server_side() { return *server_; }

  std::span<float> gradient() {
    for (size_t i = 0; i < model_.size(); ++i) bucket_[i] = model_[i] - target_[i];
    return bucket_;
  }
  std::span<float> bucket() { return bucket_; }
  const std::vector<float>& model() const { return model_; }
  // The lowest version of the servers that this rank exchanges with, or its own.
  uint64_t version() const {
    if (is_server()) return server_->version();
    uint64_t version = ~uint64_t{0};
    for (uint32_t server = layout_->workers(); server < layout_->world_size(); ++server) {
      version = std::min(version, worker_->version(server));
    }
    return version;
  }

 private:
  template <typename Body>  // calls body(i) for the values of a server
  Status for_values_of(uint32_t server, const Body& body) {
    for (const Segment& s : layout_->segments()) {
      if (s.owner != server) continue;
      for (uint64_t i = s.bucket_offset; i < s.bucket_offset + s.n; ++i) body(i);
    }
    return {};
  }
  Status apply(uint32_t server, std::span<const float> delta) {
    return for_values_of(server, [&](uint64_t i) { model_[i] += delta[i]; });
  }
  Status update(std::span<float> bucket) {
    return for_values_of(rank_, [&](uint64_t i) {
      const float before = model_[i];
      model_[i] -= 0.2f * bucket[i];
      bucket[i] = model_[i] - before;
    });
  }

  uint32_t rank_;
  std::shared_ptr<const Layout> layout_;
  std::vector<float> bucket_;
  std::vector<float> model_;  // on a server, of its own tensors
  std::vector<float> target_;
  std::unique_ptr<Exchange> exchange_;
  Exchange* view_ = nullptr;
  ServerSide* server_ = nullptr;  // the same, on a server
  WorkerSide* worker_ = nullptr;  // the same, on a worker
};

}  // namespace gradwire
