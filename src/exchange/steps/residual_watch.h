#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "exchange/shards/shard_codec.h"
#include "gradwire/exchange.h"

namespace gradwire {

// Finds residuals that outgrow their inputs (gradwire/exchange.h), whatever the reason.
class ResidualWatch {
 public:
  // Residuals are examined in every so many steps, as that costs a pass over them and the bucket.
  static constexpr uint64_t kInterval = 16;

  // Most residuals in float32 stay far below it (docs/results/error_feedback.md). Beyond it are 3lc
  // with s near 2, topk and stc that send 0.1 %, onebit without groups, each with gradients that
  // hardly change, and 3lc with a large s in a ring.
  void examine(const Shards& shards, std::span<const ShardCodec::ResidualNorms> norms,
               uint64_t step);

  [[nodiscard]] const std::vector<OutgrownResidual>& outgrown() const { return outgrown_; }

 private:
  std::vector<double> inputs_;  // of each segment: the largest sum of squares, which fades
  std::vector<OutgrownResidual> outgrown_;
};

}  // namespace gradwire
