#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "exchange/packet_exchange.h"
#include "gradwire/server.h"

namespace gradwire {

// What both sides of the server exchange share.
class ServerPackets : public PacketExchange, public ServerExchange {
 public:
  using PacketExchange::prepare;

  // What a version carries is applied as it comes.
  void retract() override {}
  // The other side.
  std::vector<uint32_t> listening() const override;

 protected:
  ServerPackets(std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
                const ServerOptions& options, uint64_t seed)
      : PacketExchange(std::move(layout), rank, std::move(execution), seed), options_(options) {}

  std::string name() const override {
    return "server, backup workers " + std::to_string(options_.backup) + ", staleness " +
           std::to_string(options_.staleness);
  }

  [[nodiscard]] const ServerOptions& options() const { return options_; }
  [[nodiscard]] uint32_t workers() const { return layout().workers(); }
  [[nodiscard]] bool is_server(uint32_t rank) const {
    return rank >= workers() && rank < world_size();
  }
  // The packet of a message from the peer, of any version, and the shard that it holds.
  Result<std::pair<Packet, uint32_t>> read(uint32_t peer, std::span<const std::byte> message) const;

 private:
  ServerOptions options_;
};

// A rank of the wrong side, or options that no run could use.
Status check_side(const Layout& layout, uint32_t rank, const ServerOptions& options, bool server);

}  // namespace gradwire
