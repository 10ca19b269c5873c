#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "exchange/shards/shard_codec.h"
#include "gradwire/exchange.h"

namespace gradwire {

// The residuals of one rank of an exchange: whether there are any, what they owe, and whether they
// outgrow their inputs (gradwire/exchange.h). The values are in the shard codec.
class Residuals {
 public:
  Residuals() = default;
  // The codec must outlive this object.
  Residuals(std::shared_ptr<const Shards> shards, ShardCodec& codec, Reduction reduction);

  // Whether any rank keeps one. Then all ranks mark steps that are not finite.
  [[nodiscard]] bool kept() const { return kept_; }

  // Adds the residuals that a lone rank took over from other ranks to its bucket, and drops them.
  // false: the bucket is not finite, so the residuals stay. Without residuals nothing is checked.
  Result<bool> pay();
  [[nodiscard]] std::vector<ResidualPiece> export_pieces() const;
  Status import_piece(const ResidualPiece& piece);

  // Looks for a residual of the shard, which is about to be encoded in step `step`, that has
  // outgrown its inputs. `steps`: how many were taken; only some are examined, as that costs a pass
  // over the residuals and the bucket.
  void examine(uint32_t shard, uint64_t step, uint64_t steps);
  [[nodiscard]] const std::vector<OutgrownResidual>& outgrown() const { return outgrown_; }

 private:
  void examine(const ShardCodec::ResidualNorms& found, uint64_t step);

  std::shared_ptr<const Shards> shards_;
  ShardCodec* codec_ = nullptr;
  Reduction reduction_ = Reduction::kAverage;
  bool kept_ = false;
  std::vector<double> inputs_;  // of each segment: the largest sum of squares, which fades
  std::vector<OutgrownResidual> outgrown_;
};

}  // namespace gradwire
