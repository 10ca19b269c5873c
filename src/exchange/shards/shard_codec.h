#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "exchange/shards/shards.h"
#include "frame/packet.h"
#include "gradwire/codec.h"
#include "gradwire/execution.h"
#include "gradwire/status.h"

namespace gradwire {

// The first NaN or Inf, if there is one.
using FirstNonFinite = std::optional<NonFiniteOrigin>;

class SharedScales;

// Does all work on the values of a bucket for an exchange. Exchanges know shards, packets and
// steps, and never touch a value: only the shard codec knows whether the values lie in the memory
// of the host or of a device. Each implementation gives the same packets.
//
// Calls come one at a time. Functions without a Status cannot fail on valid arguments; the loss of
// a device is reported by the next call that returns a Status.
class ShardCodec {
 public:
  virtual ~ShardCodec() = default;

  // Called before values are touched: see StepEvents::arrive.
  using Arrive = std::function<uint64_t(uint64_t end)>;
  // Buckets whose values lie elsewhere at first need it. Call it before begin.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  virtual void wait_by(Arrive arrive) { (void)arrive; }
  // Begins a step on `bucket`, whose values are read and changed in place until the next begin.
  virtual void begin(std::span<float> bucket) = 0;

  // Returns the first NaN or Inf in the order of the shards and of their segments.
  virtual Result<FirstNonFinite> find_non_finite(std::span<const uint32_t> shards) = 0;

  // Encodes every segment of `shards`, with its residual, into its shard's packet (packets[shard],
  // begun and empty). The values of this rank's own shard become the values that all ranks decode
  // from its packet. If a value of the shards `finite` is NaN or Inf, nothing is encoded, no
  // residual changes, and the first such value is returned. Otherwise, if a codec refuses a value
  // of `shards` (a sum with the residual can overflow), the packets are empty again, the residuals
  // are as Codec::restore leaves them, and that value is returned.
  //
  // `encoded` is called for each of `shards`, in this order, as soon as its packet is sure to stay.
  using Encoded = std::function<void(uint32_t shard)>;
  virtual Result<FirstNonFinite> encode(std::span<const uint32_t> shards,
                                        std::span<const uint32_t> finite, uint64_t step,
                                        std::span<PacketWriter> packets,
                                        const Encoded& encoded) = 0;
  // Adds the values that the packet holds back to the residuals.
  virtual void put_back(uint32_t shard, const Packet& packet) = 0;

  // The work that follows the decoding of a shard, done while its values are still in the cache.
  struct Next {
    float divisor = 1.0f;  // the values are divided by this
    bool encode = false;   // whether they are then encoded, with the present residuals
  };
  // Decodes one or more packets of one direction that hold the shard: the first is stored or added
  // as `mode` says, the others are added, in this order. Any payloads are safe.
  virtual Status decode(uint32_t shard, std::span<const Packet* const> packets, DecodeMode mode,
                        const Next& next) = 0;
  virtual void divide(uint32_t shard, float divisor) = 0;
  virtual void fill_nan(uint32_t shard) = 0;

  // The residual of segment i; kNone, and no values, if none is kept.
  [[nodiscard]] virtual ResidualType residual_type(uint32_t i) const = 0;
  [[nodiscard]] virtual std::vector<float> residual(uint32_t i) const = 0;
  // Replaces the residual of segment i by zeros of this type.
  virtual void reset_residual(uint32_t i, ResidualType type) = 0;
  // residual[first + k] += factor * values[k]
  virtual void add_to_residual(uint32_t i, uint64_t first, std::span<const float> values,
                               float factor) = 0;
  virtual void scale_residuals(float factor) = 0;
  // As in Exchange.
  [[nodiscard]] virtual uint64_t residual_bytes() const { return 0; }
  virtual void keep_residuals_in(std::span<std::byte> memory) { (void)memory; }
  // Adds the residual of segment i to the values of the bucket.
  virtual void pay_residual(uint32_t i) = 0;

  // Sums of squares, in double.
  struct Norms {
    double error = 0;  // of the part that was not sent
    double input = 0;
  };
  // Adds the norms of the shard's compressed segments, whose values in the bucket were just encoded
  // into the packet.
  virtual void add_norms(uint32_t shard, const Packet& packet, Norms& norms) = 0;

  // The sums of squares of a segment's residual and of its values in the bucket.
  struct ResidualNorms {
    uint32_t segment;
    double residual;
    double input;
  };
  // Of the segments of these shards that keep a residual; call it before they are encoded. Empty if
  // a device was lost.
  virtual std::vector<ResidualNorms> residual_norms(std::span<const uint32_t> shards) = 0;

  // From now on the segments whose pushes are terngrad are drawn with scales that all ranks share.
  // nullptr: this implementation cannot share scales.
  virtual SharedScales* share_scales() { return nullptr; }
};

// Consecutive scales, in bytes.
struct ScaleRange {
  uint64_t begin;
  uint64_t size;
};

// The scales of trits that all ranks share, so that trits can be added as integers (TernGrad,
// section 3). One float32 for each group of each segment of trits.
class SharedScales {
 public:
  virtual ~SharedScales() = default;

  // Bytes of all scales.
  [[nodiscard]] virtual uint64_t size() const = 0;
  [[nodiscard]] ScaleRange all() const { return {.begin = 0, .size = size()}; }
  // The scales of the shard's segments.
  [[nodiscard]] virtual ScaleRange of_shard(uint32_t shard) const = 0;
  // Writes the scales of this rank's values. false: a value of the bucket is NaN or Inf.
  virtual Result<bool> measure(std::span<std::byte> scales) = 0;
  // Sets the scales of this step, the largest of all ranks. Begins the sums of this rank's own
  // shard with its draws; a dedicated server draws nothing and needs only the scales of its shard.
  // ShardCodec::encode then draws pushes with these scales and encodes the sums as the pull;
  // ShardCodec::decode adds pushes to the sums, and returns kPeerMismatch with the name of a rank
  // that pushed with other scales.
  virtual Status share(std::span<const std::byte> scales, uint64_t step) = 0;
};

// Makes the shard codec of an exchange.
using ShardCodecFactory =
    std::function<Result<std::unique_ptr<ShardCodec>>(std::shared_ptr<const Shards>)>;

// Makes shard codecs for buckets in the memory of the host. They share the execution, so one thread
// must drive all exchanges that use them.
[[nodiscard]] ShardCodecFactory host_shard_codecs(Execution execution);

}  // namespace gradwire
