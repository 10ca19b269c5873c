#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/private_export.h"
#include "gradwire/direction.h"
#include "gradwire/layout.h"

namespace gradwire {

// A layout as one rank of an exchange sees it. The segments of one owner are a shard, and so are
// those that no rank owns. A rank encodes a shard at most once in a step: its own shard as a pull,
// every other shard as a push. So each segment has at most one residual on a rank.
struct Shards {
  Shards(std::shared_ptr<const Layout> of_layout, uint32_t of_rank, uint64_t draw_seed);

  std::shared_ptr<const Layout> layout;
  uint32_t rank;
  uint64_t seed;                                // of the draws
  std::vector<std::vector<uint32_t>> segments;  // of each shard: indexes in the layout
  std::vector<uint64_t> draw_streams;           // of each segment
  std::vector<bool> compressed;                 // of each segment: this rank does not send it raw

  [[nodiscard]] uint32_t count() const { return layout->world_size(); }
  [[nodiscard]] const Segment& segment(uint32_t i) const { return layout->segments()[i]; }
  // The direction in which this rank sends the shard after encoding it.
  [[nodiscard]] Direction direction(uint32_t shard) const {
    return shard == rank ? Direction::kPull : Direction::kPush;
  }
  // Whether this rank's values are averaged: it is no dedicated server.
  [[nodiscard]] bool is_worker() const { return rank < layout->workers(); }
  // A dedicated server encodes its own shard alone.
  [[nodiscard]] bool is_encoded(uint32_t shard) const { return is_worker() || shard == rank; }
  [[nodiscard]] const std::shared_ptr<const Codec>& codec(uint32_t i, Direction direction) const {
    return direction == Direction::kPush ? segment(i).push_codec : segment(i).pull_codec;
  }
  // The codec with which this rank encodes segment i.
  [[nodiscard]] const std::shared_ptr<const Codec>& own_codec(uint32_t i) const {
    return codec(i, direction(segment(i).owner));
  }
  // The type of the residual that this rank keeps for segment i. A lone rank sends nothing, so it
  // keeps no residual.
  [[nodiscard]] GW_PRIVATE_EXPORT ResidualType residual_type(uint32_t i) const;
};

// Whether any rank keeps a residual.
[[nodiscard]] bool any_residuals(const Layout& layout);

}  // namespace gradwire
