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

// Does what an exchange needs done with the values of a bucket. Exchanges know shards, packets and
// steps, and never touch a value: only the shard codec knows where the values lie, in the memory of
// the host or of a device. Each implementation gives the same packets.
//
// Calls come one at a time. Those without a Status cannot fail on valid arguments; a device that
// was lost is reported by the next call that returns a Status.
class ShardCodec {
 public:
  virtual ~ShardCodec() = default;

  // The values of the step that begins. They are worked in until the next begin.
  virtual void begin(std::span<float> bucket) = 0;

  // In the order of the shards and of their segments.
  virtual Result<FirstNonFinite> find_non_finite(std::span<const uint32_t> shards) = 0;

  // Encodes every segment of `shards`, with its residual, into its shard's packet (packets[shard],
  // begun and empty). The values of this rank's own shard become what its packet holds, as they
  // will be for whoever else decodes it. Where a value of `finite` is NaN or Inf, nothing is
  // encoded, no residual has changed, and the first such value is returned. Otherwise, where a
  // codec refuses a value of `shards` (a sum with the residual can overflow), the packets are empty
  // again, the residuals are as Codec::restore leaves them, and that value is returned.
  virtual Result<FirstNonFinite> encode(std::span<const uint32_t> shards,
                                        std::span<const uint32_t> finite, uint64_t step,
                                        std::span<PacketWriter> packets) = 0;
  // What was encoded into the packet goes back into the residuals.
  virtual void put_back(uint32_t shard, const Packet& packet) = 0;

  // What comes after a shard was decoded, so that it can be done while the values are in the cache.
  struct Next {
    float divisor = 1.0f;  // the values are divided by it
    bool encode = false;   // and then encoded, with the residuals as they are now
  };
  // Decodes one or more packets of one direction that hold the shard: the first is stored or added
  // as `mode` says, the others are added, in this order. Any payloads are safe.
  virtual Status decode(uint32_t shard, std::span<const Packet* const> packets, DecodeMode mode,
                        const Next& next) = 0;
  virtual void divide(uint32_t shard, float divisor) = 0;
  virtual void fill_nan(uint32_t shard) = 0;

  // The residual of segment i: kNone and no values where none is kept.
  [[nodiscard]] virtual ResidualType residual_type(uint32_t i) const = 0;
  [[nodiscard]] virtual std::vector<float> residual(uint32_t i) const = 0;
  // Replaces it by zeros of this type.
  virtual void reset_residual(uint32_t i, ResidualType type) = 0;
  // residual[first + k] += factor * values[k]
  virtual void add_to_residual(uint32_t i, uint64_t first, std::span<const float> values,
                               float factor) = 0;
  virtual void scale_residuals(float factor) = 0;
  // Adds it to the values of the bucket.
  virtual void pay_residual(uint32_t i) = 0;

  // Sums of squares, in double.
  struct Norms {
    double error = 0;  // of what was not sent
    double input = 0;
  };
  // Adds those of the shard, whose values in the bucket were encoded into the packet just now.
  virtual void add_norms(uint32_t shard, const Packet& packet, Norms& norms) = 0;

  // From now on the segments whose pushes are terngrad are drawn with scales that all ranks share.
  // nullptr: this implementation does not do that.
  virtual SharedScales* share_scales() { return nullptr; }
};

// The scales of trits that all ranks share, so that trits can be added as integers (TernGrad,
// section 3). One float32 for each group of each segment of trits.
class SharedScales {
 public:
  virtual ~SharedScales() = default;

  // Bytes of all scales.
  [[nodiscard]] virtual uint64_t size() const = 0;
  // Writes the scales that this rank's values have. false: a value of the bucket is NaN or Inf.
  virtual Result<bool> measure(std::span<std::byte> scales) = 0;
  // The scales of this step, the largest over all ranks. Draws this rank's part of its own shard
  // and begins the sums with it. ShardCodec::encode then draws pushes with these scales and encodes
  // the sums as the pull; ShardCodec::decode adds pushes to the sums (kPeerMismatch naming the rank
  // that pushed with other scales).
  virtual Status share(std::span<const std::byte> scales, uint64_t step) = 0;
};

// Makes the shard codec of an exchange.
using ShardCodecFactory =
    std::function<Result<std::unique_ptr<ShardCodec>>(std::shared_ptr<const Shards>)>;

// For buckets in the memory of the host. The shard codecs share the execution, so that one thread
// drives all exchanges that get them from here.
[[nodiscard]] ShardCodecFactory host_shard_codecs(Execution execution);

}  // namespace gradwire
