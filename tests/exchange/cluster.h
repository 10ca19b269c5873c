#pragma once

// All ranks of an exchange in one process.

#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "engines/loopback/loopback.h"
#include "gradwire/exchange.h"
#include "gradwire/exchange_choice.h"

namespace gradwire {

// The name in the names of tests.
inline void PrintTo(const ExchangeInfo* exchange, std::ostream* out) { *out << exchange->name; }

// The exchanges of ranks that all do the same, without servers.
inline std::vector<const ExchangeInfo*> among_equals() {
  std::vector<const ExchangeInfo*> chosen;
  for (const ExchangeInfo* exchange : exchanges()) {
    if (!exchange->has_servers) chosen.push_back(exchange);
  }
  return chosen;
}

using MakeExchange =
    std::function<std::unique_ptr<Exchange>(std::shared_ptr<const Layout> layout, uint32_t rank)>;

using Buckets = std::vector<std::vector<float>>;

inline std::vector<TensorInfo> small_tensors() {
  return {{"a.weight", {64, 64, 3}}, {"a.bias", {64}}, {"b.weight", {100, 47}}};
}

class Cluster {
 public:
  Cluster(const MakeExchange& make, uint32_t world, const std::string& codec,
          std::vector<TensorInfo> tensors = small_tensors())
      : Cluster(make, world, LayoutOptions{.codec = codec}, std::move(tensors)) {}
  Cluster(const MakeExchange& make, uint32_t world, const LayoutOptions& options,
          std::vector<TensorInfo> tensors) {
    layout_ =
        std::make_shared<const Layout>(Layout::create(std::move(tensors), world, options).value());
    for (uint32_t rank = 0; rank < world; ++rank) {
      ranks_.push_back(make(layout_, rank));
    }
  }

  uint64_t numel() const { return layout_->numel(); }
  const Layout& layout() const { return *layout_; }
  Exchange& rank(uint32_t r) { return *ranks_[r]; }
  uint32_t world() const { return static_cast<uint32_t>(ranks_.size()); }

  Status step(Buckets& buckets, uint64_t step, const LoopbackOptions& options = {}) {
    std::vector<Exchange*> exchanges;
    std::vector<std::span<float>> spans;
    for (uint32_t r = 0; r < world(); ++r) {
      exchanges.push_back(ranks_[r].get());
      spans.emplace_back(buckets[r]);
    }
    return run_loopback_step(exchanges, spans, step, options);
  }

  // For each value of the bucket, the mean of the push residuals plus the pull residual.
  std::vector<double> owed() {
    std::vector<uint64_t> starts;
    for (const TensorInfo& tensor : layout_->tensors()) {
      starts.push_back(starts.empty() ? 0 : starts.back() + previous_);
      previous_ = tensor.numel();
    }
    std::vector<double> sum(numel());
    for (uint32_t r = 0; r < world(); ++r) {
      for (const ResidualPiece& piece : ranks_[r]->export_residuals()) {
        uint64_t at = piece.offset;
        for (size_t t = 0; t < layout_->tensors().size(); ++t) {
          if (layout_->tensors()[t].name == piece.tensor) at += starts[t];
        }
        const double weight = piece.direction == Direction::kPush ? 1.0 / world() : 1.0;
        for (size_t i = 0; i < piece.values.size(); ++i) sum[at + i] += weight * piece.values[i];
      }
    }
    return sum;
  }

 private:
  std::shared_ptr<const Layout> layout_;
  std::vector<std::unique_ptr<Exchange>> ranks_;
  uint64_t previous_ = 0;
};

inline Buckets random_buckets(uint32_t world, uint64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Buckets buckets(world, std::vector<float>(n));
  for (auto& bucket : buckets) {
    for (float& value : bucket) value = normal(random);
  }
  return buckets;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace gradwire
