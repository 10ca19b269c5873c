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

  // A healthy residual in float32 stays below its limit: with a constant input it reaches 220 times
  // the input (3lc:s=1.99), 410 times (onebit) and 460 times (topk and stc that send 0.1 %).
  void examine(const Shards& shards, std::span<const ShardCodec::ResidualNorms> norms,
               uint64_t step);

  [[nodiscard]] const std::vector<OutgrownResidual>& outgrown() const { return outgrown_; }

 private:
  std::vector<double> inputs_;  // of each segment: the largest sum of squares, which fades
  std::vector<OutgrownResidual> outgrown_;
};

}  // namespace gradwire
