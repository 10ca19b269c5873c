#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "exchange/steps/packet_exchange.h"
#include "exchange/steps/packets_in_order.h"

namespace gradwire {

// The codec to take where the user names none: ExchangeInfo::default_codec.
inline constexpr std::string_view kShardedCodec = "3lc:s=1.00,coder=rice";

// The sharded exchange, and each of its legs alone.
class ShardedExchange : public PacketExchange<> {
 public:
  explicit ShardedExchange(Endpoint endpoint, Legs legs = Legs::kPushAndPull,
                           ShardUpdate update = {});

  std::vector<uint32_t> awaiting() const override {
    return pushes_.complete() ? pulls_.missing() : pushes_.missing();
  }
  bool done() const override { return pushes_.complete() && pulls_.complete(); }
  void retract() final;

 protected:
  Status begin() override;
  Status take(ReceivedPacket received) override;

 private:
  Status encode_pushes();
  Status take_push(ReceivedPacket received);
  Status end_pushes();
  Status encode_pull();

  Legs legs_;
  ShardUpdate update_;
  std::vector<uint32_t> own_;  // this rank's shard, unless another rank owns everything
  Arrivals pushes_;
  Arrivals pulls_;
  std::vector<bool> marked_;   // whether each owner's pull was a marker
  PacketsInOrder in_order_;    // the pushes
  FirstNonFinite non_finite_;  // of this rank, or of the first marker among the pushes
};

}  // namespace gradwire
