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
#include "exchange/steps/non_finite.h"
#include "exchange/steps/ranks.h"
#include "exchange/steps/received.h"
#include "exchange/steps/residuals.h"
#include "frame/packet.h"
#include "gradwire/exchange.h"

namespace gradwire {

// kInvalidArgument: the layout's bucket has padding, and the exchange knows whole tensors.
Status check_not_padded(const Layout& layout);

// The description of an exchange. `name` includes everything else that must be equal on all ranks.
[[nodiscard]] std::string describe_exchange(const ExchangeSetup& setup, const std::string& name);

// Which legs of an exchange take place: pushes to the owners of shards, pulls from them.
enum class Legs : uint8_t { kPushAndPull, kPush, kPull };

// The digest in the packets of a shard (spec/format.md). `description`: as Exchange::describe.
[[nodiscard]] uint64_t shard_digest(std::string_view description, uint64_t shard);

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
  [[nodiscard]] const Ranks& ranks() const { return ranks_; }
  [[nodiscard]] Residuals& residuals() { return residuals_; }
  [[nodiscard]] const Residuals& residuals() const { return residuals_; }
  [[nodiscard]] const NonFiniteOrigins& origins() const { return origins_; }
  [[nodiscard]] uint64_t values_in(uint32_t shard) const;
  [[nodiscard]] ShardCodec& codec() { return *codec_; }
  [[nodiscard]] ExchangeStats& stats() { return stats_; }
  [[nodiscard]] const ExchangeStats& stats() const { return stats_; }

  // Adds a kind of packet that holds no shard, of at most `max_size` bytes. Returns the number that
  // it has in a shard's place.
  uint32_t add_round(uint64_t max_size);
  [[nodiscard]] uint64_t digest(uint32_t shard) const { return digests_[shard]; }

  void set_events(StepEvents events);
  // The shard's values hold the result.
  void finish_values(uint32_t shard) const;
  // 0 if they lie elsewhere: those that a lone rank has imported, and will pay.
  [[nodiscard]] uint64_t residual_bytes() const {
    return ranks_.peers().empty() ? 0 : codec_->residual_bytes();
  }
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
  Result<FirstNonFinite> encode(std::span<const uint32_t> shards, std::span<const uint32_t> finite,
                                const ShardCodec::Encoded& each = {});
  Status decode(uint32_t shard, std::span<const Packet* const> packets, DecodeMode mode,
                const ShardCodec::Next& next = {});
  Status decode(uint32_t shard, const Packet& packet, DecodeMode mode,
                const ShardCodec::Next& next = {});
  void divide(uint32_t shard, float divisor);
  // The sum over all ranks is divided by it to give the result.
  [[nodiscard]] float divisor() const {
    return reduction_ == Reduction::kAverage ? static_cast<float>(ranks_.count()) : 1.0f;
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
  // The shards whose values must be finite: `shards` if any rank keeps a residual or the setup asks
  // for it, else none.
  [[nodiscard]] std::span<const uint32_t> to_check(std::span<const uint32_t> shards) const {
    return residuals_.kept() || marks_non_finite_ ? shards : std::span<const uint32_t>();
  }
  [[nodiscard]] const std::vector<TensorTraffic>& traffic() const { return traffic_; }

 private:
  Endpoint(const ExchangeSetup& setup, std::string description);
  [[nodiscard]] bool owns(uint32_t shard) const { return shard == ranks_.own(); }
  void examine_residual(uint32_t shard);
  void count_encoded(uint32_t shard);
  void hand_out(OutgoingMessage message);
  [[nodiscard]] Status check_frames(const ReceivedPacket& received) const;

  std::shared_ptr<const Shards> shards_;
  std::unique_ptr<ShardCodec> codec_;
  Ranks ranks_;
  Residuals residuals_;
  NonFiniteOrigins origins_;
  std::string description_;
  Reduction reduction_ = Reduction::kAverage;
  std::vector<uint64_t> digests_;      // of each shard
  std::vector<PacketWriter> writers_;  // of each shard
  uint64_t max_message_size_ = 0;
  bool marks_non_finite_ = false;

  std::span<float> bucket_;
  uint64_t step_ = 0;
  StepEvents events_;
  std::vector<OutgoingMessage> outgoing_;
  ExchangeStats stats_;
  std::vector<TensorTraffic> traffic_;  // of each tensor
};

}  // namespace gradwire
