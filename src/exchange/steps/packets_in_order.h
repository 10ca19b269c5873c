#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "exchange/steps/received.h"

namespace gradwire {

// The packets that a step adds up, handed out in ascending order of ranks, so that the sum has the
// same bits in whatever order they arrive.
class PacketsInOrder {
 public:
  explicit PacketsInOrder(uint32_t ranks) : ranks_(ranks) {}

  void begin() {
    for (Arrival& arrival : ranks_) arrival = {};
    next_ = 0;
  }
  // The packet of this rank has arrived; nothing: the rank adds nothing.
  void put(uint32_t rank, std::optional<ReceivedPacket> packet) {
    ranks_[rank] = {.arrived = true, .packet = std::move(packet)};
  }

  // The packets up to the first rank that is missing, without those of earlier calls. Valid until
  // drop().
  [[nodiscard]] std::vector<const Packet*> next() {
    std::vector<const Packet*> packets;
    for (; next_ < ranks_.size() && ranks_[next_].arrived; ++next_) {
      if (ranks_[next_].packet) packets.push_back(&ranks_[next_].packet->packet);
    }
    return packets;
  }
  // Whether next() has handed out the packets of no rank, or of all.
  [[nodiscard]] bool none_taken() const { return next_ == 0; }
  [[nodiscard]] bool all_taken() const { return next_ == ranks_.size(); }
  // Drops the packets that were handed out, and copies the others, whose memory belongs to the
  // caller of Exchange::receive.
  void drop() {
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      std::optional<ReceivedPacket>& packet = ranks_[rank].packet;
      if (rank < next_) packet.reset();
      if (packet) packet->keep();
    }
  }

 private:
  struct Arrival {
    bool arrived = false;
    std::optional<ReceivedPacket> packet = {};
  };

  std::vector<Arrival> ranks_;
  uint32_t next_ = 0;
};

}  // namespace gradwire
