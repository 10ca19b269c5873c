#include <algorithm>
#include <map>
#include <utility>

#include "base/return_if_error.h"
#include "exchange/server_exchange.h"
#include "exchange/timer.h"

namespace gradwire {
namespace {

SharedBytes share(std::span<const std::byte> bytes) {
  return std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end());
}

class ServerWorker final : public ServerPackets {
 public:
  ServerWorker(std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
               const ServerOptions& options, ApplyDelta apply, uint64_t seed)
      : ServerPackets(std::move(layout), rank, std::move(execution), options, seed),
        apply_(std::move(apply)),
        links_(world_size()),
        held_back_(world_size()) {}

  bool done() const override { return awaiting().empty(); }
  std::vector<uint32_t> awaiting() const override;
  Status receive(uint32_t peer, std::span<const std::byte> message) override;

  uint64_t version(uint32_t server) const override {
    return is_server(server) ? links_[server].pulled : 0;
  }
  Status set_version(uint32_t server, uint64_t version) override;
  const std::vector<uint64_t>& dropped_pushes() const override { return held_back_; }
  std::vector<uint32_t> behind() const override { return {}; }
  Status caught_up(uint32_t) override {
    return {StatusCode::kInvalidArgument, "a worker serves nobody"};
  }
  Status catch_up(uint32_t server, uint64_t version) override;

 protected:
  Status begin_step() override;
  uint64_t step_of(uint32_t server) const override {
    return std::max(links_[server].pushed, links_[server].pulled);
  }

 private:
  // How far this worker is with one server.
  struct Link {
    uint64_t pushed = 0;  // the version behind the last that was pushed
    uint64_t pulled = 0;  // versions that were applied
    uint64_t known = 0;   // versions that are known to be finished
    std::map<uint64_t, std::vector<std::byte>> early;  // pulls that came before an older one
    std::map<uint64_t, SharedBytes> sent;              // pushes of versions that are not here yet
  };

  std::optional<NonFiniteOrigin> find_poison();
  Status pull(uint32_t server, const Packet& packet);

  ApplyDelta apply_;
  std::vector<Link> links_;          // by rank; those of the servers are used
  std::vector<uint64_t> held_back_;  // pushes, by rank
};

Status ServerWorker::set_version(uint32_t server, uint64_t version) {
  if (!is_server(server)) {
    return {StatusCode::kInvalidArgument, "rank " + std::to_string(server) + " is no server"};
  }
  if (stats().steps > 0) return unexpected("set_version: a step was taken already");
  links_[server].pushed = links_[server].pulled = links_[server].known = version;
  return {};
}

Status ServerWorker::catch_up(uint32_t server, uint64_t version) {
  if (!is_server(server) || version <= links_[server].pulled) {
    return {
        StatusCode::kInvalidArgument,
        "rank " + std::to_string(server) + " gives no model of version " + std::to_string(version)};
  }
  Link& link = links_[server];
  link.pushed = std::max(link.pushed, version);
  link.pulled = version;
  link.known = std::max(link.known, version);
  std::erase_if(link.early, [=](const auto& pull) { return pull.first < version; });
  std::erase_if(link.sent, [=](const auto& push) { return push.first < version; });
  return {};
}

std::vector<uint32_t> ServerWorker::awaiting() const {
  std::vector<uint32_t> servers;
  for (uint32_t server = workers(); server < world_size(); ++server) {
    const Link& link = links_[server];
    if (link.pushed > link.pulled + options().staleness || link.known > link.pulled) {
      servers.push_back(server);
    }
  }
  return servers;
}

Status ServerWorker::begin_step() {
  // Where this worker was late, it may have newer versions of one server than of another. A step is
  // for the oldest: a push for a version that the other workers have not come to might wait for
  // them, who wait for this one.
  uint64_t oldest = step_of(workers());
  for (uint32_t server = workers(); server < world_size(); ++server) {
    oldest = std::min(oldest, step_of(server));
  }
  std::vector<uint32_t> servers;
  for (uint32_t server = workers(); server < world_size(); ++server) {
    if (step_of(server) == oldest) {
      servers.push_back(server);
    } else {
      ++held_back_[server];
    }
  }
  std::optional<NonFiniteOrigin> poison = find_poison();
  for (uint32_t server : servers) {
    if (poison) break;
    Result<std::optional<NonFiniteOrigin>> origin = encode(server);
    if (!origin.ok()) return origin.status();
    poison = origin.value();
    if (!poison) continue;
    for (uint32_t earlier = workers(); earlier < server; ++earlier) put_back(earlier);
  }
  if (!poison) sample_error_norm();
  for (uint32_t server : servers) {
    Link& link = links_[server];
    const uint64_t version = step_of(server);
    const SharedBytes packet = share(finish(server, poison));
    send(server, PacketRole::kPush, packet);
    link.sent.emplace(version, packet);
    link.pushed = version + 1;
  }
  return {};
}

// Looked at first, as a whole: a step that will be skipped must not touch any residual here. Also
// without residuals: NaN must not get into the servers' model, which nobody could restore.
std::optional<NonFiniteOrigin> ServerWorker::find_poison() {
  const Timer timer(counted().encode_seconds);
  for (uint32_t server = workers(); server < world_size(); ++server) {
    if (std::optional<NonFiniteOrigin> poison = find_non_finite(server)) return poison;
  }
  return std::nullopt;
}

Status ServerWorker::receive(uint32_t peer, std::span<const std::byte> message) {
  Result<std::pair<Packet, uint32_t>> read_packet = read(peer, message);
  if (!read_packet.ok()) return read_packet.status();
  const auto& [packet, shard] = read_packet.value();
  const std::string from = "rank " + std::to_string(peer);
  if (packet.header.role != PacketRole::kPull || !is_server(peer) || shard != peer) {
    return unexpected(from + " sent what a worker has no use for");
  }
  Link& link = links_[peer];
  const uint64_t version = packet.header.step;
  if (stats().steps == 0) return unexpected(from + " sent a version before the first push");
  if (version < link.pulled || link.early.contains(version)) {
    return unexpected(from + " sent version " + std::to_string(version) + " twice");
  }
  counted().pull_bytes_received += message.size();
  link.known = std::max(link.known, version + 1);
  if (version != link.pulled) {
    link.early.emplace(version, std::vector<std::byte>(message.begin(), message.end()));
    return {};
  }
  GW_RETURN_IF_ERROR(pull(peer, packet));
  for (auto next = link.early.begin(); next != link.early.end() && next->first == link.pulled;
       next = link.early.erase(next)) {
    GW_RETURN_IF_ERROR(pull(peer, parse_packet(next->second).value()));
  }
  return {};
}

Status ServerWorker::pull(uint32_t server, const Packet& packet) {
  Link& link = links_[server];
  const auto sent = link.sent.find(link.pulled);
  if (packet.non_finite) {
    void_shard(server, *packet.non_finite);
    if (sent != link.sent.end()) put_back(server, parse_packet(*sent->second).value());
  } else {
    GW_RETURN_IF_ERROR(decode(server, packet, DecodeMode::kStore));
    if (apply_) GW_RETURN_IF_ERROR(apply_(server, link.pulled, bucket()));
  }
  if (sent != link.sent.end()) link.sent.erase(sent);
  ++link.pulled;
  return {};
}

}  // namespace

Result<std::unique_ptr<ServerExchange>> make_server_worker(std::shared_ptr<const Layout> layout,
                                                           uint32_t rank, Execution execution,
                                                           const ServerOptions& options,
                                                           ApplyDelta apply, uint64_t seed) {
  GW_RETURN_IF_ERROR(check_side(*layout, rank, options, false));
  auto exchange = std::make_unique<ServerWorker>(std::move(layout), rank, std::move(execution),
                                                 options, std::move(apply), seed);
  GW_RETURN_IF_ERROR(exchange->prepare());
  return std::unique_ptr<ServerExchange>(std::move(exchange));
}

}  // namespace gradwire
