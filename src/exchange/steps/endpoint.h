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
#include "exchange/steps/residual_watch.h"
#include "frame/packet.h"
#include "gradwire/exchange.h"

namespace gradwire {

// kUnexpectedMessage: the protocol allows no such message or call at this time.
[[nodiscard]] Status unexpected(const std::string& what);

// "rank 3": how messages name a rank.
[[nodiscard]] std::string name_of(uint32_t rank);

// kInvalidArgument: rank is not below the layout's world size, or the layout leaves all to servers.
Status check_rank(const Layout& layout, uint32_t rank);

// kInvalidArgument: the layout's bucket has padding, and the exchange knows whole tensors.
Status check_not_padded(const Layout& layout);

// The description of an exchange. `name` includes everything else that must be equal on all ranks.
[[nodiscard]] std::string describe_exchange(const ExchangeSetup& setup, const std::string& name);

// Which legs of an exchange take place: pushes to the owners of shards, pulls from them.
enum class Legs : uint8_t { kPushAndPull, kPush, kPull };

// The digest in the packets of a shard (spec/format.md). `description`: as Exchange::describe.
[[nodiscard]] uint64_t shard_digest(std::string_view description, uint64_t shard);

// The bytes of a message, shared by all that still need them.
using SharedBytes = std::shared_ptr<const std::vector<std::byte>>;

// A received message, parsed and verified once. The frames of the packet lie in the message, or,
// if that is empty, in the endpoint's memory: then the packet is this rank's own.
struct ReceivedPacket {
  uint32_t peer;
  uint32_t shard;
  Packet packet;
  std::span<const std::byte> message;
  SharedBytes kept = {};

  // Copies the message, whose memory otherwise belongs to the caller.
  void keep();
  [[nodiscard]] bool is_push() const { return packet.header.direction == Direction::kPush; }
};

// Which of the awaited messages of a step have arrived. Each message is identified by a rank.
class Arrivals {
 public:
  // Begins a step that awaits one message for each of `ranks` except `but`.
  void await(std::span<const uint32_t> ranks, uint32_t but) {
    missing_.assign(ranks.begin(), ranks.end());
    std::erase(missing_, but);
  }
  // false: the message was not awaited, or has arrived before.
  [[nodiscard]] bool take(uint32_t rank) { return std::erase(missing_, rank) == 1; }
  [[nodiscard]] bool complete() const { return missing_.empty(); }
  [[nodiscard]] const std::vector<uint32_t>& missing() const { return missing_; }

 private:
  std::vector<uint32_t> missing_;
};

// One rank's end of an exchange: it makes outgoing packets, checks incoming packets, and keeps the
// statistics. A packet holds one shard: a push on its way to the owner, or the owner's pull. Only
// the shard codec touches values.
class Endpoint {
 public:
  // Allocates packets and residuals. `description`: all that must be equal on all ranks.
  // Returns the statuses of PacketWriter::create and of the shard codec's factory.
  static Result<Endpoint> create(const ExchangeSetup& setup, std::string description);

  [[nodiscard]] const std::string& describe() const { return description_; }
  [[nodiscard]] const Layout& layout() const { return *shards_->layout; }
  [[nodiscard]] uint32_t rank() const { return shards_->rank; }
  [[nodiscard]] uint32_t world_size() const { return shards_->count(); }
  [[nodiscard]] std::span<const uint32_t> everyone() const { return everyone_; }
  [[nodiscard]] std::span<const uint32_t> peers() const { return peers_; }
  [[nodiscard]] std::span<const uint32_t> shards() const { return all_shards_; }
  // The ranks whose shards have packets: all, or the one that owns everything (Layout::owner).
  [[nodiscard]] std::span<const uint32_t> owners() const { return owners_; }
  [[nodiscard]] bool is_owner(uint32_t rank) const {
    return layout().owner().value_or(rank) == rank;
  }
  [[nodiscard]] uint64_t values_in(uint32_t shard) const;
  [[nodiscard]] ShardCodec& codec() { return *codec_; }
  [[nodiscard]] ExchangeStats& stats() { return stats_; }
  [[nodiscard]] const ExchangeStats& stats() const { return stats_; }

  // Adds a kind of packet that holds no shard, of at most `max_size` bytes. Returns the number that
  // it has in a shard's place.
  uint32_t add_round(uint64_t max_size);
  [[nodiscard]] uint64_t digest(uint32_t shard) const { return digests_[shard]; }

  // Begins a step, but sends nothing yet.
  void begin(std::span<float> bucket, uint64_t step);
  // Sets the bucket before the first step.
  void lend(std::span<float> bucket);
  [[nodiscard]] std::span<float> bucket() const { return bucket_; }
  [[nodiscard]] uint64_t step() const { return step_; }
  // Writes `step` instead of step() into the headers of the shard's packets.
  void set_step(uint32_t shard, uint64_t step);
  std::vector<OutgoingMessage> take_outgoing();

  // The most bytes of any packet of this exchange.
  [[nodiscard]] uint64_t max_message_size() const { return max_message_size_; }
  // Parses a message and checks that it is of this exchange, in any step; counts its bytes.
  Result<ReceivedPacket> open(uint32_t peer, std::span<const std::byte> message);
  // kUnexpectedMessage unless the packet is of the step under way.
  [[nodiscard]] Status check_step(const ReceivedPacket& received, bool done) const;

  // As in ShardCodec; the time is added to the statistics. Where an earlier leg found a value that
  // is not finite, this is returned at once.
  Result<FirstNonFinite> find_non_finite(std::span<const uint32_t> shards);
  Result<FirstNonFinite> encode(std::span<const uint32_t> shards, std::span<const uint32_t> finite);
  Status decode(uint32_t shard, std::span<const Packet* const> packets, DecodeMode mode,
                const ShardCodec::Next& next = {});
  Status decode(uint32_t shard, const Packet& packet, DecodeMode mode,
                const ShardCodec::Next& next = {});
  void divide(uint32_t shard, float divisor);
  // The sum over all ranks is divided by it to give the result.
  [[nodiscard]] float divisor() const {
    return reduction_ == Reduction::kAverage ? static_cast<float>(world_size()) : 1.0f;
  }
  // Adds the encoded values of the shard back to the residuals.
  void put_back(uint32_t shard);
  // In some steps, adds to the statistics how much the pushes left unsent.
  void sample_error_norm();

  // Finishes the packet of the encoded shard, or makes a marker if there is an origin.
  std::span<const std::byte> finish(uint32_t shard, const FirstNonFinite& origin);
  [[nodiscard]] Packet encoded(uint32_t shard) const { return writers_[shard].packet(); }
  // `packet` must stay unchanged until the next step begins.
  void send(uint32_t peer, Direction direction, std::span<const std::byte> packet);
  // The same for the scales of trits.
  void send_scales(uint32_t peer, Direction direction, std::span<const std::byte> packet);
  // Here the outgoing message itself keeps the packet.
  void send(uint32_t peer, Direction direction, const SharedBytes& packet);

  // Called if the shard's pull is a marker: the shard's values become NaN.
  void mark_non_finite(uint32_t shard, const NonFiniteOrigin& origin);
  [[nodiscard]] const std::optional<NonFiniteInput>& non_finite() const { return non_finite_; }
  // The number in markers of a rank of this exchange.
  [[nodiscard]] uint32_t outer_rank(uint32_t rank) const;
  // The rank of this exchange that brought the value. The origin came from another rank and may be
  // wrong.
  [[nodiscard]] uint32_t leg_rank(const NonFiniteOrigin& origin) const;

  // Whether any rank keeps a residual. Then all ranks mark steps that are not finite.
  [[nodiscard]] bool keeps_residuals() const { return keeps_residuals_; }
  // The shards whose values must be finite: `shards` if any rank keeps a residual or the setup asks
  // for it, else none.
  [[nodiscard]] std::span<const uint32_t> to_check(std::span<const uint32_t> shards) const {
    return keeps_residuals_ || marks_non_finite_ ? shards : std::span<const uint32_t>();
  }
  [[nodiscard]] const std::vector<OutgrownResidual>& outgrown() const { return watch_.outgrown(); }
  [[nodiscard]] const std::vector<TensorTraffic>& traffic() const { return traffic_; }
  // Adds the residuals that a lone rank took over from other ranks to its bucket, and drops them.
  // false: the bucket is not finite, so the residuals stay. Without residuals nothing is checked.
  Result<bool> pay_residuals();
  [[nodiscard]] std::vector<ResidualPiece> export_residuals() const;
  Status import_residual(const ResidualPiece& piece);

 private:
  Endpoint() = default;
  [[nodiscard]] bool owns(uint32_t shard) const { return shard == rank(); }
  void watch_residual(uint32_t shard);
  [[nodiscard]] Status check_frames(const ReceivedPacket& received) const;
  // What an earlier leg found, as an origin in this layout.
  [[nodiscard]] FirstNonFinite known_origin() const;
  // The same origin with the rank's number in markers.
  [[nodiscard]] FirstNonFinite in_marker(FirstNonFinite origin) const;

  std::shared_ptr<const Shards> shards_;
  std::unique_ptr<ShardCodec> codec_;
  std::string description_;
  Reduction reduction_ = Reduction::kAverage;
  std::vector<uint64_t> digests_;  // of each shard
  std::vector<uint32_t> everyone_;
  std::vector<uint32_t> peers_;
  std::vector<uint32_t> all_shards_;
  std::vector<uint32_t> owners_;
  std::vector<PacketWriter> writers_;  // of each shard
  uint64_t max_message_size_ = 0;
  bool keeps_residuals_ = false;
  bool marks_non_finite_ = false;
  Origins origins_;

  std::span<float> bucket_;
  uint64_t step_ = 0;
  std::optional<NonFiniteInput> non_finite_;
  std::vector<OutgoingMessage> outgoing_;
  ResidualWatch watch_;
  ExchangeStats stats_;
  std::vector<TensorTraffic> traffic_;  // of each tensor
};

}  // namespace gradwire
