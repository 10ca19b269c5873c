#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "exchange/steps/endpoint.h"

namespace gradwire {

// The round of a step in which scales of trits travel, so that the largest of all ranks becomes
// everyone's (TernGrad, section 3.1, equation 4). It comes before the trits.
class ScaleRound {
 public:
  // packets: the scales of each packet that this rank makes in the round. The endpoint gets a kind
  // of packet for the round. kInvalidArgument, with `exchange` as the name: the shard codec cannot
  // share scales.
  static Result<ScaleRound> create(Endpoint& endpoint, const std::string& exchange);
  Status add_packet(ScaleRange scales);

  [[nodiscard]] SharedScales& shared() const { return *shared_; }
  // The round's number, in a shard's place.
  [[nodiscard]] uint32_t number() const { return number_; }

  // Begins a step that awaits scales of each of `ranks` except `but`.
  void begin(std::span<const uint32_t> ranks, uint32_t but);
  // Measures the scales of this rank's values, or finds the first that is not finite.
  Status measure(Endpoint& endpoint);
  // Keeps the larger of each scale and of its like in the packet; of markers, that of the lowest
  // rank. kUnexpectedMessage: this rank's scales came before. kPeerMismatch, kCorruptPayload: no
  // packet of these scales.
  Status take(const Endpoint& endpoint, const ReceivedPacket& received, ScaleRange scales);
  // The packet of the scales as they are now, or the marker. Valid until it is made again.
  Result<std::span<const std::byte>> packet(size_t i, Endpoint& endpoint, Direction direction,
                                            uint64_t step);
  // Once all have arrived: draws with the scales, which are now everyone's.
  Status share(Endpoint& endpoint, uint64_t step);

  [[nodiscard]] bool complete() const { return arrivals_.complete(); }
  [[nodiscard]] const std::vector<uint32_t>& missing() const { return arrivals_.missing(); }
  [[nodiscard]] const FirstNonFinite& non_finite() const { return non_finite_; }

 private:
  struct Outgoing {
    ScaleRange scales;
    PacketWriter writer;
  };

  // Of a packet of these scales.
  [[nodiscard]] std::vector<PacketWriter::Segment> frames(ScaleRange scales) const;

  SharedScales* shared_ = nullptr;
  std::shared_ptr<const Codec> codec_;  // raw
  uint32_t number_ = 0;
  std::vector<Outgoing> outgoing_;
  std::vector<std::byte> scales_;  // f32: the largest so far
  Arrivals arrivals_;
  FirstNonFinite non_finite_;  // of the lowest rank that is not finite
};

}  // namespace gradwire
