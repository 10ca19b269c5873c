#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/return_if_error.h"
#include "exchange/steps/server_packets.h"

namespace gradwire {
namespace {

class WorkerExchange final : public PacketExchange<WorkerSide> {
 public:
  WorkerExchange(ServerEnd end, const ServerOptions& options, ApplyDelta apply)
      : PacketExchange(std::move(end.endpoint)),
        servers_(server_ranks(layout())),
        staleness_(options.staleness),
        apply_(std::move(apply)),
        links_(ranks().count()),
        held_back_(ranks().count()),
        scales_(std::move(end.scales)),
        signals_(end.signals) {}

  std::vector<uint32_t> awaiting() const override;
  std::vector<uint32_t> listening() const override { return servers_; }
  bool done() const override { return awaiting().empty(); }
  void retract() override {}  // a version is applied as soon as it arrives

  uint64_t version(uint32_t server) const override {
    return is_server(server) ? links_[server].pulled : 0;
  }
  uint64_t next_version() const override;
  bool has_turn() const override { return std::ranges::any_of(links_, &Link::again); }
  Status hold_back() override;
  Status set_version(uint32_t server, uint64_t version) override;
  const std::vector<uint64_t>& dropped_pushes() const override { return held_back_; }
  Status catch_up(uint32_t server, uint64_t version) override;
  Status join(uint32_t server, uint64_t first, std::span<float> bucket) override;

 private:
  // The progress of this worker with one server.
  struct Link {
    uint64_t pushed = 0;                       // one above the newest version that was pushed
    uint64_t pulled = 0;                       // number of versions that were applied
    uint64_t known = 0;                        // number of versions known to be finished
    bool joins = false;                        // it pulls versions before the first push
    bool again = false;                        // it may push for the version `pulled` once more
    std::map<uint64_t, ReceivedPacket> early;  // pulls that arrived before an older version's
    // Pushes of versions whose pulls are awaited.
    std::multimap<uint64_t, ReceivedPacket> sent;

    [[nodiscard]] uint64_t next() const { return again ? pulled : std::max(pushed, pulled); }
  };

  [[nodiscard]] bool is_server(uint32_t rank) const {
    return std::ranges::binary_search(servers_, rank);
  }
  Status begin() override;
  Status take(ReceivedPacket received) override;
  // Sends each server the scales of its tensors, for the version that is pushed next.
  Status send_scales();
  Status take_scales(const ReceivedPacket& received);
  Status take_turn(const ReceivedPacket& received);
  Status push();
  // Sends no push, but asks for the versions that this worker lacks.
  Status hold_back(uint32_t server);
  Status pull(uint32_t server, const Packet& packet);

  std::vector<uint32_t> servers_;
  uint64_t staleness_;
  ApplyDelta apply_;
  std::vector<Link> links_;           // by rank; only the servers' are used
  std::vector<uint64_t> held_back_;   // number of pushes held back, by rank
  std::optional<ScaleRound> scales_;  // nothing: no trits have shared scales
  uint32_t signals_;                  // as in ServerEnd
};

// A late worker may have newer versions of one server than of another. It pushes only for the
// oldest version: a push for a newer version might wait for the other workers, while they wait for
// this worker.
uint64_t WorkerExchange::next_version() const {
  uint64_t oldest = links_[servers_.front()].next();
  for (uint32_t server : servers_) oldest = std::min(oldest, links_[server].next());
  return oldest;
}

Status WorkerExchange::hold_back() {
  for (uint32_t server : servers_) GW_RETURN_IF_ERROR(hold_back(server));
  return {};
}

// Without the question, two servers could be ahead in turns for ever.
Status WorkerExchange::hold_back(uint32_t server) {
  ++held_back_[server];
  return send_signal(endpoint_, signals_, server, Direction::kPush, links_[server].pulled);
}

Status WorkerExchange::set_version(uint32_t server, uint64_t version) {
  if (!is_server(server)) {
    return {StatusCode::kInvalidArgument, name_of(server) + " is no server"};
  }
  if (endpoint_.stats().steps > 0) return unexpected("set_version: a step was taken already");
  links_[server].pushed = links_[server].pulled = links_[server].known = version;
  return {};
}

Status WorkerExchange::catch_up(uint32_t server, uint64_t version) {
  if (!is_server(server) || version <= links_[server].pulled) {
    return {StatusCode::kInvalidArgument,
            name_of(server) + " gives no model of version " + std::to_string(version)};
  }
  Link& link = links_[server];
  link.pushed = std::max(link.pushed, version);
  link.pulled = version;
  link.known = std::max(link.known, version);
  link.again = false;
  std::erase_if(link.early, [=](const auto& pull) { return pull.first < version; });
  std::erase_if(link.sent, [=](const auto& push) { return push.first < version; });
  return {};
}

Status WorkerExchange::join(uint32_t server, uint64_t first, std::span<float> bucket) {
  if (!is_server(server) || first < links_[server].pulled) {
    return {StatusCode::kInvalidArgument,
            name_of(server) + " takes no first push of version " + std::to_string(first)};
  }
  if (endpoint_.stats().steps > 0) return unexpected("join: a step was taken already");
  if (bucket.size() != layout().numel()) {
    return {StatusCode::kLengthMismatch,
            "join: the layout has " + std::to_string(layout().numel()) + " values, the bucket " +
                std::to_string(bucket.size())};
  }
  endpoint_.lend(bucket);
  links_[server].pushed = first;
  links_[server].joins = true;
  return {};
}

std::vector<uint32_t> WorkerExchange::awaiting() const {
  if (scales_ && !scales_->complete()) return scales_->missing();
  std::vector<uint32_t> awaited = servers_;
  std::erase_if(awaited, [&](uint32_t server) {
    const Link& link = links_[server];
    const bool may_push = link.again || link.pushed <= link.pulled + staleness_;
    return may_push && link.known <= link.pulled;
  });
  return awaited;
}

Status WorkerExchange::begin() { return scales_ ? send_scales() : push(); }

Status WorkerExchange::send_scales() {
  scales_->begin(servers_, rank());
  GW_RETURN_IF_ERROR(scales_->measure(endpoint_));
  for (size_t i = 0; i < servers_.size(); ++i) {
    GW_ASSIGN_OR_RETURN(
        std::span<const std::byte> packet,
        scales_->packet(i, endpoint_, Direction::kPush, links_[servers_[i]].next()));
    endpoint_.send_scales(servers_[i], Direction::kPush, packet);
  }
  return {};
}

Status WorkerExchange::take_scales(const ReceivedPacket& received) {
  const uint32_t server = received.peer;
  if (received.packet.header.step != links_[server].next()) {
    return unexpected(name_of(server) + " sent scales of version " +
                      std::to_string(received.packet.header.step) + ", not of version " +
                      std::to_string(links_[server].next()));
  }
  GW_RETURN_IF_ERROR(scales_->take(endpoint_, received, scales_->shared().of_shard(server)));
  if (!scales_->complete()) return {};
  if (!scales_->non_finite()) {
    GW_RETURN_IF_ERROR(scales_->share(endpoint_, links_[server].next()));
  }
  return push();
}

Status WorkerExchange::take_turn(const ReceivedPacket& received) {
  Link& link = links_[received.peer];
  const uint64_t version = received.packet.header.step;
  if (version < link.pulled) return {};  // the version was finished in the meantime
  if (version != link.pulled || link.pushed != version + 1 || link.again ||
      received.packet.non_finite || !received.packet.frames.empty()) {
    return unexpected(name_of(received.peer) + " gave another turn for version " +
                      std::to_string(version) + ", and none is due");
  }
  link.again = true;
  return {};
}

Status WorkerExchange::push() {
  const uint64_t oldest = next_version();
  std::vector<uint32_t> servers;
  for (uint32_t server : servers_) {
    if (links_[server].next() == oldest) {
      servers.push_back(server);
      endpoint_.set_step(server, oldest);
    } else {
      GW_RETURN_IF_ERROR(hold_back(server));
    }
  }
  // All tensors are checked, whether residuals are kept or not: a step that will be skipped must
  // not change any residual here, and NaN must not get into the servers' model.
  FirstNonFinite origin = scales_ ? scales_->non_finite() : FirstNonFinite();
  if (!origin) {
    GW_ASSIGN_OR_RETURN(origin, endpoint_.encode(servers, servers_));
  }
  if (!origin) endpoint_.sample_error_norm();
  for (uint32_t server : servers) {
    ReceivedPacket push = {.peer = server,
                           .shard = server,
                           .packet = endpoint_.encoded(server),
                           .message = endpoint_.finish(server, origin)};
    push.keep();
    endpoint_.send(server, Direction::kPush, push.kept);
    links_[server].sent.emplace(oldest, std::move(push));
    links_[server].pushed = oldest + 1;
    links_[server].again = false;
  }
  return {};
}

Status WorkerExchange::take(ReceivedPacket received) {
  const uint32_t peer = received.peer;
  const bool of_scales = scales_ && received.shard == scales_->number();
  const bool is_turn = received.shard == signals_;
  if (received.is_push() || !is_server(peer) ||
      (received.shard != peer && !of_scales && !is_turn)) {
    return unexpected(name_of(peer) + " sent what a worker has no use for");
  }
  if (of_scales) return take_scales(received);
  if (is_turn) return take_turn(received);
  Link& link = links_[peer];
  const uint64_t version = received.packet.header.step;
  if (endpoint_.stats().steps == 0 && !link.joins) {
    return unexpected(name_of(peer) + " sent a version before the first push");
  }
  if (version < link.pulled || link.early.contains(version)) {
    return unexpected(name_of(peer) + " sent version " + std::to_string(version) + " twice");
  }
  link.known = std::max(link.known, version + 1);
  if (version != link.pulled) {
    received.keep();
    link.early.emplace(version, std::move(received));
    return {};
  }
  GW_RETURN_IF_ERROR(pull(peer, received.packet));
  for (auto next = link.early.begin(); next != link.early.end() && next->first == link.pulled;
       next = link.early.erase(next)) {
    GW_RETURN_IF_ERROR(pull(peer, next->second.packet));
  }
  return {};
}

Status WorkerExchange::pull(uint32_t server, const Packet& packet) {
  Link& link = links_[server];
  if (packet.non_finite) {
    endpoint_.mark_non_finite(server, *packet.non_finite);
    const auto [first, last] = link.sent.equal_range(link.pulled);
    for (auto push = first; push != last; ++push) {
      endpoint_.codec().put_back(server, push->second.packet);
    }
  } else {
    GW_RETURN_IF_ERROR(endpoint_.decode(server, packet, DecodeMode::kStore));
    if (apply_) GW_RETURN_IF_ERROR(apply_(server, link.pulled, endpoint_.bucket()));
  }
  link.sent.erase(link.pulled);
  link.again = false;
  ++link.pulled;
  return {};
}

}  // namespace

Result<std::unique_ptr<Exchange>> make_worker_side(ExchangeSetup setup,
                                                   const ServerOptions& options) {
  if (setup.options.update) {
    return Status(StatusCode::kInvalidArgument,
                  "worker " + name_of(setup.rank) + ": only servers take an update");
  }
  GW_ASSIGN_OR_RETURN(ServerEnd end,
                      make_server_end(setup, worker_ranks(*setup.layout), "worker", options));
  return std::unique_ptr<Exchange>(
      std::make_unique<WorkerExchange>(std::move(end), options, std::move(setup.options.apply)));
}

}  // namespace gradwire
