#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "base/return_if_error.h"
#include "exchange/server_exchange.h"

namespace gradwire {
namespace {

class Server final : public ServerPackets {
 public:
  Server(std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
         const ServerOptions& options, ShardUpdate update, uint64_t seed)
      : ServerPackets(std::move(layout), rank, std::move(execution), options, seed),
        update_(std::move(update)),
        links_(workers()),
        dropped_(workers()) {}

  bool done() const override { return done_; }
  std::vector<uint32_t> awaiting() const override;
  bool awaits_any() const override { return true; }
  Status receive(uint32_t peer, std::span<const std::byte> message) override;

  uint64_t version(uint32_t server) const override { return server == rank() ? version_ : 0; }
  Status set_version(uint32_t server, uint64_t version) override;
  const std::vector<uint64_t>& dropped_pushes() const override { return dropped_; }
  std::vector<uint32_t> behind() const override;
  Status caught_up(uint32_t worker) override;
  Status catch_up(uint32_t, uint64_t) override {
    return {StatusCode::kInvalidArgument, "a server has all versions"};
  }

 protected:
  Status begin_step() override;
  bool encodes(uint32_t shard) const override { return shard == rank(); }

 private:
  // How far a worker is.
  struct Link {
    uint64_t pushed = 0;                                // the version behind the last it pushed
    uint64_t sent = 0;                                  // versions it was sent
    bool behind = false;                                // and what it lacks is kept no more
    std::map<uint64_t, std::vector<std::byte>> pushes;  // of versions that are not finished
  };

  [[nodiscard]] bool has_push(uint32_t worker) const {
    return links_[worker].pushes.contains(version_);
  }
  // What can be done with the pushes that are here.
  Status advance();
  Status add(uint32_t worker);
  Status finish_version();
  Status update_and_encode();
  Status drop(uint32_t worker, uint64_t version);
  // The versions that the worker lacks, the newest first: so it knows at once how far behind it is.
  Status send_missing(uint32_t worker);
  void trim_history();

  ShardUpdate update_;
  std::vector<Link> links_;  // by worker
  std::vector<uint64_t> dropped_;
  uint64_t version_ = 0;  // finished versions; the number of the one under way
  bool done_ = true;
  uint32_t next_ = 0;                      // the worker whose push is added next
  uint32_t added_ = 0;                     // pushes
  std::optional<NonFiniteOrigin> poison_;  // of the lowest rank whose push was a marker
  std::deque<SharedBytes> history_;        // the pulls up to version_
};

Status Server::set_version(uint32_t server, uint64_t version) {
  if (server != rank()) {
    return {StatusCode::kInvalidArgument, "rank " + std::to_string(server) + " is another server"};
  }
  if (stats().steps > 0) return unexpected("set_version: a step was taken already");
  version_ = version;
  for (Link& link : links_) link.pushed = link.sent = version;
  return {};
}

std::vector<uint32_t> Server::awaiting() const {
  std::vector<uint32_t> missing;
  if (done_) return missing;
  for (uint32_t worker = 0; worker < workers(); ++worker) {
    if (!has_push(worker)) missing.push_back(worker);
  }
  return missing;
}

Status Server::begin_step() {
  if (step() != version_) {
    return {StatusCode::kInvalidArgument, "start: version " + std::to_string(version_) +
                                              " is next, not " + std::to_string(step())};
  }
  done_ = false;
  next_ = added_ = 0;
  poison_.reset();
  return advance();
}

Status Server::receive(uint32_t peer, std::span<const std::byte> message) {
  Result<std::pair<Packet, uint32_t>> read_packet = read(peer, message);
  if (!read_packet.ok()) return read_packet.status();
  const auto& [packet, shard] = read_packet.value();
  const uint64_t version = packet.header.step;
  const std::string which =
      "rank " + std::to_string(peer) + " sent its push of version " + std::to_string(version);
  if (packet.header.role != PacketRole::kPush || peer >= workers() || shard != rank()) {
    return unexpected("rank " + std::to_string(peer) + " sent what a server has no use for");
  }
  Link& link = links_[peer];
  counted().push_bytes_received += message.size();
  if (version < version_) return drop(peer, version);
  if (link.pushes.contains(version)) return unexpected(which + " twice");
  if (version > link.sent + options().staleness) {
    return unexpected(which + ", but was sent no version above " + std::to_string(link.sent) +
                      ", and may be " + std::to_string(options().staleness) + " ahead");
  }
  link.pushed = std::max(link.pushed, version + 1);
  link.pushes.emplace(version, std::vector<std::byte>(message.begin(), message.end()));
  return done_ ? Status() : advance();
}

Status Server::drop(uint32_t worker, uint64_t version) {
  if (options().backup == 0) {
    return unexpected("rank " + std::to_string(worker) + " sent its push of version " +
                      std::to_string(version) + ", but version " + std::to_string(version_) +
                      " is under way");
  }
  ++dropped_[worker];
  links_[worker].pushed = std::max(links_[worker].pushed, version + 1);
  GW_RETURN_IF_ERROR(send_missing(worker));
  trim_history();
  return {};
}

Status Server::advance() {
  // Whoever may yet be left out is known only at the end; those in front of them are added now.
  for (; next_ < workers() && has_push(next_); ++next_) GW_RETURN_IF_ERROR(add(next_));
  uint32_t here = 0;
  for (uint32_t worker = 0; worker < workers(); ++worker) here += has_push(worker) ? 1 : 0;
  return here < workers() - options().backup ? Status() : finish_version();
}

Status Server::add(uint32_t worker) {
  const Packet packet = parse_packet(links_[worker].pushes.at(version_)).value();
  if (packet.non_finite && !poison_) poison_ = packet.non_finite;
  const DecodeMode mode = added_++ == 0 ? DecodeMode::kStore : DecodeMode::kAdd;
  return poison_ ? Status() : decode(rank(), packet, mode);
}

Status Server::finish_version() {
  for (; next_ < workers(); ++next_) {
    if (has_push(next_)) GW_RETURN_IF_ERROR(add(next_));
  }
  GW_RETURN_IF_ERROR(update_and_encode());
  const std::span<const std::byte> packet = finish(rank(), poison_);
  history_.push_back(std::make_shared<const std::vector<std::byte>>(packet.begin(), packet.end()));
  if (poison_) {
    void_shard(rank(), *poison_);
  } else {
    GW_RETURN_IF_ERROR(decode_own(rank()));
  }
  const uint64_t finished = version_++;
  done_ = true;
  for (uint32_t worker = 0; worker < workers(); ++worker) {
    links_[worker].pushes.erase(finished);
    if (links_[worker].pushed > finished) GW_RETURN_IF_ERROR(send_missing(worker));
  }
  trim_history();
  return {};
}

Status Server::update_and_encode() {
  if (!poison_) {
    divide(rank(), static_cast<float>(added_));
    poison_ = find_non_finite(rank());  // the sum may have overflowed
  }
  if (poison_) return {};
  if (update_) GW_RETURN_IF_ERROR(update_(bucket()));
  Result<std::optional<NonFiniteOrigin>> origin = encode(rank());
  if (!origin.ok()) return origin.status();
  const std::optional<NonFiniteOrigin> bad =
      origin.value() ? origin.value() : find_non_finite(rank());
  if (!bad) return {};
  // Unlike a gradient it can't be left out: the model itself is spoilt.
  const Segment& segment = layout().segments()[bad->segment];
  return {StatusCode::kNonFinite, "the update of version " + std::to_string(version_) +
                                      " on rank " + std::to_string(rank()) + " made tensor '" +
                                      layout().tensors()[segment.tensor].name + "' not finite"};
}

std::vector<uint32_t> Server::behind() const {
  std::vector<uint32_t> found;
  for (uint32_t worker = 0; worker < workers(); ++worker) {
    if (links_[worker].behind) found.push_back(worker);
  }
  return found;
}

Status Server::caught_up(uint32_t worker) {
  if (worker >= workers() || !links_[worker].behind) {
    return {StatusCode::kInvalidArgument, "rank " + std::to_string(worker) + " is not behind"};
  }
  links_[worker].behind = false;
  links_[worker].sent = version_;
  return {};
}

Status Server::send_missing(uint32_t worker) {
  Link& link = links_[worker];
  const uint64_t oldest = version_ - history_.size();
  if (link.sent < oldest) {
    if (options().behind == ServerOptions::Behind::kReport) {
      link.behind = true;
      return {};
    }
    return {StatusCode::kLimitExceeded, "rank " + std::to_string(worker) + " is " +
                                            std::to_string(version_ - link.sent) +
                                            " versions behind; the server keeps the last " +
                                            std::to_string(history_.size()) + " (history)"};
  }
  for (uint64_t version = version_; version-- > link.sent;) {
    send(worker, PacketRole::kPull, history_[version - oldest]);
  }
  link.sent = version_;
  return {};
}

void Server::trim_history() {
  uint64_t needed = version_;
  for (const Link& link : links_) needed = std::min(needed, link.sent);
  while (history_.size() > std::min(version_ - needed, options().history)) history_.pop_front();
}

}  // namespace

Result<std::unique_ptr<ServerExchange>> make_server(std::shared_ptr<const Layout> layout,
                                                    uint32_t rank, Execution execution,
                                                    const ServerOptions& options,
                                                    ShardUpdate update, uint64_t seed) {
  GW_RETURN_IF_ERROR(check_side(*layout, rank, options, true));
  auto exchange = std::make_unique<Server>(std::move(layout), rank, std::move(execution), options,
                                           std::move(update), seed);
  GW_RETURN_IF_ERROR(exchange->prepare());
  return std::unique_ptr<ServerExchange>(std::move(exchange));
}

}  // namespace gradwire
