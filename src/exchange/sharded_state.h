#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "frame/packet.h"
#include "gradwire/exchange.h"
#include "gradwire/residual.h"

namespace gradwire {

// A message or a call that the protocol has no place for.
[[nodiscard]] Status unexpected(const std::string& what);

enum class Arrival : uint8_t { kMissing, kHere };

// The sharded exchange between two calls: who has sent what, and the residuals.
struct ShardedExchange::State {
  State(std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution, uint64_t seed);
  Status make_writers();

  [[nodiscard]] uint32_t world_size() const { return layout->world_size(); }
  [[nodiscard]] bool owns(const Segment& segment) const { return segment.owner == rank; }
  [[nodiscard]] bool done() const { return pushes_missing == 0 && pulls_missing == 0; }
  [[nodiscard]] std::span<float> values(const Segment& segment) const {
    return bucket.subspan(segment.bucket_offset, segment.n);
  }
  // The values that `owner` sums. Shards are contiguous.
  [[nodiscard]] std::span<float> shard(uint32_t owner) const;

  void begin_step(std::span<float> new_bucket, uint64_t new_step);
  // A lone rank sends nothing and owes nothing, unless it took over residuals of other ranks.
  void pay_residuals();
  Status encode_pushes();
  Status check_header(uint32_t peer, const PacketHeader& header) const;
  // Are these the frames of the segments that `owner` owns?
  Status check_frames(uint32_t peer, const Packet& packet, uint32_t owner) const;
  Status take_push(uint32_t peer, const Packet& packet, std::span<const std::byte> message);
  Status take_pull(uint32_t peer, const Packet& packet);
  void retract();

  std::shared_ptr<const Layout> layout;
  uint32_t rank;
  Execution execution;
  uint64_t seed;
  uint64_t digest = 0;
  std::vector<std::vector<uint32_t>> owned;  // segments of each owner
  std::vector<PacketWriter> writers;         // by owner: the pushes; at `rank`: the pull
  std::vector<Residual> residuals;           // by segment: of its push, or of its pull where owned
  std::vector<uint64_t> streams;             // by segment: what its random words are drawn from
  bool keeps_residuals = false;

  std::span<float> bucket;
  uint64_t step = 0;
  uint32_t pushes_missing = 0;
  uint32_t pulls_missing = 0;
  std::vector<Arrival> push_arrivals;
  std::vector<Arrival> pull_arrivals;
  std::vector<bool> voided;  // owners whose pull was a marker: the pushes to them came to nothing
  std::vector<std::vector<std::byte>> early_pushes;  // came before a lower rank's
  uint32_t next_push = 0;                            // the rank to be added next
  std::optional<NonFiniteOrigin> poison;             // first marker among the pushes
  std::optional<NonFiniteInput> non_finite;
  std::vector<OutgoingMessage> outgoing;
  ExchangeStats stats;

 private:
  [[nodiscard]] DrawContext draw(uint32_t segment) const;
  [[nodiscard]] PacketHeader header(PacketRole role) const;
  // The first value of the segments that is NaN or Inf.
  [[nodiscard]] std::optional<NonFiniteOrigin> find_non_finite(std::span<const uint32_t> segments);
  // Encodes the segments of `owner` into its writer. Where a sum with the residual overflows, what
  // had been encoded is put back and the origin is returned.
  Result<std::optional<NonFiniteOrigin>> encode(uint32_t owner, PacketRole role);
  void put_back(uint32_t owner);
  Status add_push(const Packet& packet);
  Status add_pushes_in_order();
  Status encode_pull();
  Status store_pull(const Packet& packet, uint32_t owner);
  void note_non_finite(const NonFiniteOrigin& origin);
  void sample_error_norm();
};

}  // namespace gradwire
