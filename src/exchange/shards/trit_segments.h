#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "codecs/ternary.h"
#include "codecs/terngrad/terngrad.h"
#include "codecs/trit_sums.h"
#include "exchange/shards/shard_codec.h"
#include "gradwire/execution.h"

namespace gradwire {

// The segments of trits with shared scales, in the memory of the host.
class TritSegments final : public SharedScales {
 public:
  TritSegments(const Shards& shards, Execution& execution);

  void begin(std::span<float> bucket) { bucket_ = bucket; }
  // Whether segment i is sent as trits with shared scales.
  [[nodiscard]] bool has(uint32_t i) const { return trits_[i].has_value(); }
  // This rank's payload of segment i: its draws, or the sums of a segment that it owns.
  uint64_t encode(uint32_t i, uint64_t step, std::span<std::byte> payload);
  // Adds a push of `source` to the sums.
  Status add(uint32_t i, uint32_t source, std::span<const std::byte> payload);

  [[nodiscard]] uint64_t size() const override { return scales_.size(); }
  [[nodiscard]] ScaleRange of_shard(uint32_t shard) const override { return ranges_[shard]; }
  Result<bool> measure(std::span<std::byte> scales) override;
  Status share(std::span<const std::byte> scales, uint64_t step) override;

 private:
  struct Trits {
    TernGradParameters parameters;
    TernaryShape shape;
    uint64_t scales_at;  // offset in scales_, in bytes
    float limit = 0;     // this rank's values are clipped to it
    TritSums sums = {};  // on the owner alone
  };

  [[nodiscard]] const Codec& push_codec(uint32_t i) const { return *shards_.segment(i).push_codec; }
  [[nodiscard]] bool owns(uint32_t i) const { return shards_.segment(i).owner == shards_.rank; }
  [[nodiscard]] std::span<const float> values(uint32_t i) const {
    return bucket_.subspan(shards_.segment(i).bucket_offset, shards_.segment(i).n);
  }
  // Writes the scales of segments [first, end), which are a tensor. A tensor's clipping, and its
  // scale if it has no groups, are those of all its values, however many owners have a piece.
  // false: a value is NaN or Inf.
  bool measure_tensor(uint32_t first, uint32_t end, std::span<std::byte> scales);
  uint64_t draw(uint32_t i, uint64_t step, std::span<std::byte> payload);

  const Shards& shards_;
  Execution& execution_;
  std::span<float> bucket_;
  std::vector<std::optional<Trits>> trits_;  // of each segment
  std::vector<ScaleRange> ranges_;           // of each shard, in scales_
  std::vector<std::byte> scales_;
  std::vector<std::byte> own_payload_;  // this rank's draws of a segment that it owns
};

}  // namespace gradwire
