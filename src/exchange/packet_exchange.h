#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "frame/packet.h"
#include "gradwire/exchange.h"
#include "gradwire/residual.h"

namespace gradwire {

// A message or a call that the protocol has no place for.
[[nodiscard]] Status unexpected(const std::string& what);

// Whether a step can begin on a bucket of so many values: kUnexpectedMessage, kLengthMismatch.
Status check_start(const Exchange& exchange, uint64_t values);

// kInvalidArgument: rank is not below the layout's world size, or the layout leaves all to servers.
Status check_rank(const Layout& layout, uint32_t rank);

// The bytes of a message, held by all who still need them.
using SharedBytes = std::shared_ptr<const std::vector<std::byte>>;

enum class Arrival : uint8_t { kMissing, kHere };

// What a rank draws its random words for a segment from: by name, so that no other tensor has the
// same, whichever bucket it lies in.
[[nodiscard]] uint64_t draw_stream(const Layout& layout, uint32_t rank, const Segment& segment);

// What the exchanges of packets share. The segments of one owner are a shard, and a packet holds
// one shard: its push on the way to the owner, or the owner's pull. A rank encodes every segment
// once a step at most, pushing what others own and pulling what it owns, so a segment has one
// residual here.
class PacketExchange : public virtual Exchange {
 public:
  std::string describe() const final;
  Status start(std::span<float> bucket, uint64_t step) final;
  std::vector<OutgoingMessage> take_outgoing() final;
  const std::optional<NonFiniteInput>& non_finite() const final { return non_finite_; }
  bool keeps_residuals() const noexcept final { return keeps_residuals_; }
  void scale_residuals(float factor) final;
  std::vector<ResidualPiece> export_residuals() const final;
  Status import_residual(const ResidualPiece& piece) final;
  const ExchangeStats& stats() const noexcept final { return stats_; }
  const Layout& layout() const noexcept final { return *layout_; }

 protected:
  PacketExchange(std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
                 uint64_t seed, Reduction reduction = Reduction::kAverage);
  // Takes the memory for packets and residuals. Statuses as PacketWriter::create.
  Status prepare();

  [[nodiscard]] virtual std::string name() const = 0;
  // Whether this rank ever encodes the shard, and so keeps residuals for it.
  [[nodiscard]] virtual bool encodes(uint32_t /*shard*/) const { return true; }
  // The step that stands in the headers of the shard's packets.
  [[nodiscard]] virtual uint64_t step_of(uint32_t /*shard*/) const { return step_; }
  // The bucket and the step are set, nothing of it is sent.
  virtual Status begin_step() = 0;

  // Segment `i` of the layout by its codec and residual, or as an exchange knows better.
  virtual Status encode_segment(uint32_t i, PacketWriter& writer);
  virtual Status decode_segment(uint32_t i, const PacketHeader& header,
                                std::span<const std::byte> payload, DecodeMode mode);

  [[nodiscard]] uint32_t rank() const final { return rank_; }
  [[nodiscard]] uint32_t world_size() const { return layout_->world_size(); }
  [[nodiscard]] uint64_t step() const { return step_; }
  [[nodiscard]] std::span<float> bucket() const { return bucket_; }
  [[nodiscard]] std::span<float> values(const Segment& segment) const {
    return bucket_.subspan(segment.bucket_offset, segment.n);
  }
  [[nodiscard]] Execution& execution() { return execution_; }
  [[nodiscard]] DrawContext draw_context(uint32_t i) const {
    return {.seed = seed_, .stream = streams_[i], .step = step_of(layout_->segments()[i].owner)};
  }
  [[nodiscard]] ExchangeStats& counted() { return stats_; }

  // A lone rank sends nothing and owes nothing, unless it took over residuals of other ranks.
  // Returns whether its bucket is finite, as far as that matters.
  bool pay_residuals();

  // The first value of the shard that is NaN or Inf.
  [[nodiscard]] std::optional<NonFiniteOrigin> find_non_finite(uint32_t shard);
  // Whether the message is for this step and from a peer; the shard that its packet holds.
  Result<uint32_t> shard_of(uint32_t peer, const Packet& packet) const;
  // The same for a message of any step.
  Result<uint32_t> shard_of_any_step(uint32_t peer, const Packet& packet) const;

  // Encodes the shard's values of the bucket. Where a sum with the residual overflows, what had
  // been encoded is put back and the origin is returned.
  Result<std::optional<NonFiniteOrigin>> encode(uint32_t shard);
  // What was encoded of the shard goes back into the residuals.
  void put_back(uint32_t shard);
  // The same for a packet that was finished here some time ago.
  void put_back(uint32_t shard, const Packet& packet);
  // The packet of what was encoded, or the marker.
  std::span<const std::byte> finish(uint32_t shard, const std::optional<NonFiniteOrigin>& poison);
  // `packet` stays as it is until the next start.
  void send(uint32_t peer, PacketRole role, std::span<const std::byte> packet);
  // As long as someone holds the packet.
  void send(uint32_t peer, PacketRole role, const SharedBytes& packet);

  Status decode(uint32_t shard, const Packet& packet, DecodeMode mode);
  // Makes the shard's sum what is wanted.
  void finish_sum(uint32_t shard);
  void divide(uint32_t shard, float divisor);
  // The same bits as whoever decodes the packet gets.
  Status decode_own(uint32_t shard);
  // For a shard whose pull is a marker.
  void void_shard(uint32_t shard, const NonFiniteOrigin& origin);

  // Now and then: how much the pushes of this step left unsent.
  void sample_error_norm();

 private:
  [[nodiscard]] bool owns(uint32_t shard) const { return shard == rank_; }
  [[nodiscard]] const Codec& codec_of(const Segment& segment) const;
  [[nodiscard]] PacketHeader header(uint32_t shard) const;
  void put_back_segment(uint32_t i, std::span<const std::byte> payload);
  Status check_frames(uint32_t peer, const Packet& packet, uint32_t shard) const;

  std::shared_ptr<const Layout> layout_;
  uint32_t rank_;
  Execution execution_;
  uint64_t seed_;
  Reduction reduction_;
  std::vector<uint64_t> digests_;              // of each shard
  std::vector<std::vector<uint32_t>> shards_;  // segments of each
  std::vector<PacketWriter> writers_;          // of each shard
  std::vector<Residual> residuals_;            // of each segment
  std::vector<uint64_t> streams_;  // of each segment: what its random words are drawn from
  bool keeps_residuals_ = false;

  std::span<float> bucket_;
  uint64_t step_ = 0;
  std::optional<NonFiniteInput> non_finite_;
  std::vector<OutgoingMessage> outgoing_;
  ExchangeStats stats_;
};

}  // namespace gradwire
