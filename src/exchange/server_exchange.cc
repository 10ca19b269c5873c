#include "exchange/server_exchange.h"

namespace gradwire {

Result<std::pair<Packet, uint32_t>> ServerPackets::read(uint32_t peer,
                                                        std::span<const std::byte> message) const {
  Result<Packet> parsed = parse_packet(message);
  if (!parsed.ok()) {
    return Status(parsed.status().code(),
                  "message from rank " + std::to_string(peer) + ": " + parsed.status().message());
  }
  Result<uint32_t> shard = shard_of_any_step(peer, parsed.value());
  if (!shard.ok()) return shard.status();
  return std::pair(std::move(parsed).value(), shard.value());
}

std::vector<uint32_t> ServerPackets::listening() const {
  const bool server = is_server(rank());
  std::vector<uint32_t> ranks;
  for (uint32_t peer = server ? 0 : workers(); peer < (server ? workers() : world_size()); ++peer) {
    ranks.push_back(peer);
  }
  return ranks;
}

Status check_side(const Layout& layout, uint32_t rank, const ServerOptions& options, bool server) {
  const auto invalid = [](const std::string& what) {
    return Status(StatusCode::kInvalidArgument, what);
  };
  if (layout.servers() == 0) return invalid("the layout has no servers");
  const uint32_t first = server ? layout.workers() : 0;
  const uint32_t end = server ? layout.world_size() : layout.workers();
  if (rank < first || rank >= end) {
    return invalid("rank " + std::to_string(rank) + " is no " + (server ? "server" : "worker") +
                   "; those are ranks " + std::to_string(first) + " to " + std::to_string(end - 1));
  }
  if (options.backup >= layout.workers()) {
    return invalid(std::to_string(options.backup) + " backup workers of " +
                   std::to_string(layout.workers()) + " workers leave no push to wait for");
  }
  if (options.history <= options.staleness) {
    return invalid("a history of " + std::to_string(options.history) +
                   " versions is too short for workers that may be " +
                   std::to_string(options.staleness) + " behind");
  }
  return {};
}

}  // namespace gradwire
