#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "exchange/steps/exchange_entry.h"
#include "frame/packet.h"
#include "gradwire/exchange.h"

namespace gradwire {

// A message or a call that the protocol has no place for.
[[nodiscard]] Status unexpected(const std::string& what);

// "rank 3": how messages name a rank.
[[nodiscard]] std::string name_of(uint32_t rank);

// kInvalidArgument: rank is not below the layout's world size, or the layout leaves all to servers.
Status check_rank(const Layout& layout, uint32_t rank);

// The description of an exchange. `name`: with whatever else must be equal on all ranks.
[[nodiscard]] std::string describe_exchange(const ExchangeSetup& setup, const std::string& name);

// The bytes of a message, held by all who still need them.
using SharedBytes = std::shared_ptr<const std::vector<std::byte>>;

// A message that came, parsed and verified once. The frames of the packet lie in the message.
struct ReceivedPacket {
  uint32_t peer;
  uint32_t shard;
  Packet packet;
  std::span<const std::byte> message;
  SharedBytes kept = {};

  // Copies the message, which otherwise is the caller's.
  void keep();
  [[nodiscard]] bool is_push() const { return packet.header.direction == Direction::kPush; }
};

// Which of the awaited messages of a step are here. They are told apart by a rank.
class Arrivals {
 public:
  // A step begins, in which one message for each of these ranks but one is awaited.
  void await(std::span<const uint32_t> ranks, uint32_t but) {
    missing_.assign(ranks.begin(), ranks.end());
    std::erase(missing_, but);
  }
  // false: it was not awaited, or came before.
  [[nodiscard]] bool take(uint32_t rank) { return std::erase(missing_, rank) == 1; }
  [[nodiscard]] bool complete() const { return missing_.empty(); }
  [[nodiscard]] bool awaits(uint32_t rank) const { return std::ranges::count(missing_, rank) > 0; }
  [[nodiscard]] const std::vector<uint32_t>& missing() const { return missing_; }

 private:
  std::vector<uint32_t> missing_;
};

// One rank's end of an exchange: it makes the packets that go out, checks those that come in, and
// counts. A packet holds one shard: a push on its way to the owner, or the owner's pull. The values
// are the shard codec's affair.
class Endpoint {
 public:
  // Takes the memory for packets and residuals. `description`: what must be equal on all ranks.
  // Statuses of PacketWriter::create and the shard codec's factory.
  static Result<Endpoint> create(const ExchangeSetup& setup, std::string description);

  [[nodiscard]] const std::string& describe() const { return description_; }
  [[nodiscard]] const Layout& layout() const { return *shards_->layout; }
  [[nodiscard]] uint32_t rank() const { return shards_->rank; }
  [[nodiscard]] uint32_t world_size() const { return shards_->count(); }
  [[nodiscard]] std::span<const uint32_t> everyone() const { return everyone_; }
  [[nodiscard]] std::span<const uint32_t> peers() const { return peers_; }
  [[nodiscard]] ShardCodec& codec() { return *codec_; }
  [[nodiscard]] ExchangeStats& stats() { return stats_; }
  [[nodiscard]] const ExchangeStats& stats() const { return stats_; }

  // A kind of packet that holds no shard. Returns what stands for it where shards are told apart.
  uint32_t add_round();
  [[nodiscard]] uint64_t digest(uint32_t shard) const { return digests_[shard]; }

  // A step begins; nothing of it is sent.
  void begin(std::span<float> bucket, uint64_t step);
  [[nodiscard]] std::span<float> bucket() const { return bucket_; }
  [[nodiscard]] uint64_t step() const { return step_; }
  // The step that stands in the headers of the shard's packets, if it is another.
  void set_step(uint32_t shard, uint64_t step);
  std::vector<OutgoingMessage> take_outgoing();

  // Parses a message and checks that it is of this exchange, of any step; counts its bytes.
  Result<ReceivedPacket> open(uint32_t peer, std::span<const std::byte> message);
  // kUnexpectedMessage unless the packet is of the step under way.
  [[nodiscard]] Status check_step(const ReceivedPacket& received, bool done) const;

  // As ShardCodec says; the time is counted.
  Result<FirstNonFinite> find_non_finite(std::span<const uint32_t> shards);
  Result<FirstNonFinite> encode(std::span<const uint32_t> shards, std::span<const uint32_t> finite);
  Status decode(uint32_t shard, std::span<const Packet* const> packets, DecodeMode mode,
                const ShardCodec::Next& next = {});
  Status decode(uint32_t shard, const Packet& packet, DecodeMode mode,
                const ShardCodec::Next& next = {});
  void divide(uint32_t shard, float divisor);
  // What makes the sum over all ranks the result.
  [[nodiscard]] float divisor() const {
    return reduction_ == Reduction::kAverage ? static_cast<float>(world_size()) : 1.0f;
  }
  // What was encoded of the shard goes back into the residuals.
  void put_back(uint32_t shard);
  // Now and then: how much the pushes of this step left unsent.
  void sample_error_norm();

  // The packet of what was encoded, or the marker.
  std::span<const std::byte> finish(uint32_t shard, const FirstNonFinite& origin);
  [[nodiscard]] Packet encoded(uint32_t shard) const { return writers_[shard].packet(); }
  // `packet` stays as it is until the next step begins.
  void send(uint32_t peer, Direction direction, std::span<const std::byte> packet);
  // As long as someone holds the packet.
  void send(uint32_t peer, Direction direction, const SharedBytes& packet);

  // The shard's pull is a marker: its values become NaN.
  void mark_non_finite(uint32_t shard, const NonFiniteOrigin& origin);
  [[nodiscard]] const std::optional<NonFiniteInput>& non_finite() const { return non_finite_; }

  // Whether any rank keeps a residual. Then all ranks mark steps that are not finite.
  [[nodiscard]] bool keeps_residuals() const { return keeps_residuals_; }
  // `shards` if any rank keeps a residual, or none: those whose values must be finite.
  [[nodiscard]] std::span<const uint32_t> to_check(std::span<const uint32_t> shards) const {
    return keeps_residuals_ ? shards : std::span<const uint32_t>();
  }
  // A lone rank sends nothing and owes nothing, unless it took over residuals of other ranks.
  // Returns whether its bucket is finite, as far as that matters.
  Result<bool> pay_residuals();
  [[nodiscard]] std::vector<ResidualPiece> export_residuals() const;
  Status import_residual(const ResidualPiece& piece);

 private:
  Endpoint() = default;
  [[nodiscard]] bool owns(uint32_t shard) const { return shard == rank(); }
  [[nodiscard]] Status check_frames(const ReceivedPacket& received) const;

  std::shared_ptr<const Shards> shards_;
  std::unique_ptr<ShardCodec> codec_;
  std::string description_;
  Reduction reduction_ = Reduction::kAverage;
  std::vector<uint64_t> digests_;  // of each shard
  std::vector<uint32_t> everyone_;
  std::vector<uint32_t> peers_;
  std::vector<PacketWriter> writers_;  // of each shard
  bool keeps_residuals_ = false;

  std::span<float> bucket_;
  uint64_t step_ = 0;
  std::optional<NonFiniteInput> non_finite_;
  std::vector<OutgoingMessage> outgoing_;
  ExchangeStats stats_;
};

}  // namespace gradwire
