#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "frame/packet.h"

namespace gradwire {

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

}  // namespace gradwire
