#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "exchange/packet_exchange.h"

namespace gradwire {

enum class Legs : uint8_t { kPushAndPull, kPush, kPull };

// make_sharded_exchange, and each of its legs alone; what TernGrad's exchange does after its max
// round.
class ShardedExchange : public PacketExchange {
 public:
  ShardedExchange(std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
                  uint64_t seed, Legs legs, Reduction reduction, ShardUpdate update = {})
      : PacketExchange(std::move(layout), rank, std::move(execution), seed, reduction),
        legs_(legs),
        update_(std::move(update)),
        push_arrivals_(world_size()),
        pull_arrivals_(world_size()),
        voided_(world_size()),
        early_pushes_(world_size()) {}

  using PacketExchange::prepare;

  bool done() const override { return pushes_missing_ == 0 && pulls_missing_ == 0; }
  std::vector<uint32_t> awaiting() const override;
  Status receive(uint32_t peer, std::span<const std::byte> message) override;
  void retract() override;

 protected:
  std::string name() const override {
    if (legs_ == Legs::kPush) return "reduce-scatter";
    if (legs_ == Legs::kPull) return "allgather";
    return update_ ? "sharded, with updates" : "sharded";
  }
  Status begin_step() override;

 private:
  Status encode_pushes();
  Status take_push(uint32_t peer, const Packet& packet, std::span<const std::byte> message);
  Status add_pushes_in_order();
  Status end_pushes();
  Status encode_pull();

  Legs legs_;
  ShardUpdate update_;
  uint32_t pushes_missing_ = 0;
  uint32_t pulls_missing_ = 0;
  std::vector<Arrival> push_arrivals_;
  std::vector<Arrival> pull_arrivals_;
  std::vector<bool> voided_;  // owners whose pull was a marker: the pushes to them came to nothing
  std::vector<std::vector<std::byte>> early_pushes_;  // came before a lower rank's
  uint32_t next_push_ = 0;                            // the rank to be added next
  std::optional<NonFiniteOrigin> poison_;             // first marker among the pushes
};

}  // namespace gradwire
