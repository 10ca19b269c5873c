#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "base/return_if_error.h"
#include "exchange/steps/server_packets.h"

namespace gradwire {
namespace {

class ServerExchange final : public PacketExchange<ServerSide> {
 public:
  ServerExchange(ServerEnd end, const ServerOptions& options, ShardUpdate update)
      : PacketExchange(std::move(end.endpoint)),
        options_(options),
        update_(std::move(update)),
        links_(layout().workers()),
        dropped_(links_.size()),
        scales_(std::move(end.scales)),
        signals_(end.signals) {
    await_scales();
  }

  std::vector<uint32_t> awaiting() const override;
  bool awaits_any() const override { return true; }
  std::vector<uint32_t> listening() const override { return worker_ranks(layout()); }
  bool done() const override { return done_; }
  void retract() override {}  // a version is applied as soon as it is finished

  uint64_t version() const override { return version_; }
  Status set_version(uint64_t version) override;
  const std::vector<uint64_t>& dropped_pushes() const override { return dropped_; }
  std::vector<uint32_t> behind() const override;
  Status caught_up(uint32_t worker) override;
  std::vector<uint32_t> pushed() const override;
  Status lose(uint32_t worker) override;
  Status join(uint32_t worker, uint64_t first) override;

 private:
  // The progress of one worker.
  struct Link {
    uint64_t pushed = 0;  // one above the newest version it pushed
    uint64_t sent = 0;    // number of versions sent to it
    bool behind = false;  // history_ has dropped versions that it lacks
    bool lost = false;    // no version waits for it
    bool joins = false;   // it has not pushed since it joined
    uint64_t first = 0;   // the first version that waits for it
    uint32_t turns = 0;   // beside its own, in the version under way
    // For versions that are not finished, in the order of arrival.
    std::map<uint64_t, std::vector<ReceivedPacket>> pushes;
  };

  [[nodiscard]] uint32_t workers() const { return static_cast<uint32_t>(links_.size()); }
  // How many pushes of the worker have come for the version under way.
  [[nodiscard]] size_t count_pushes(uint32_t worker) const {
    const auto found = links_[worker].pushes.find(version_);
    return found == links_[worker].pushes.end() ? 0 : found->second.size();
  }
  // Whether the version under way waits, or waited, for the worker's push.
  [[nodiscard]] bool expects(uint32_t worker) const {
    return !links_[worker].lost && links_[worker].first <= version_;
  }
  Status begin() override;
  Status take(ReceivedPacket received) override;
  // Scales of a version are taken as soon as the version before is finished.
  void await_scales();
  Status take_scales(const ReceivedPacket& received);
  // Lets a worker whose push has come compute another gradient for the version under way, in the
  // turn of a worker that is behind, if one is left.
  Status give_turn(uint32_t worker);
  // Sends all workers the largest scales.
  Status share_scales();
  // Adds the pushes that can be added now, and finishes the version if enough have arrived.
  Status advance();
  Status add(const ReceivedPacket& push);
  Status finish_version();
  Status update_and_encode();
  Status drop(uint32_t worker, uint64_t version);
  // Sends the versions that the worker lacks, newest first, so it learns at once how many it lacks.
  Status send_missing(uint32_t worker);
  void trim_history();

  ServerOptions options_;
  ShardUpdate update_;
  std::vector<Link> links_;  // by worker
  std::vector<uint64_t> dropped_;
  uint64_t version_ = 0;  // number of finished versions, and the version under way
  bool done_ = true;
  uint32_t next_ = 0;                 // the worker whose push is added next
  uint32_t added_ = 0;                // number of pushes added to the sum
  FirstNonFinite non_finite_;         // of the lowest rank whose push was a marker
  std::deque<SharedBytes> history_;   // the newest pulls, up to version_
  std::optional<ScaleRound> scales_;  // nothing: no trits have shared scales
  bool scales_sent_ = false;          // of the version under way
  uint32_t signals_;                  // as in ServerEnd
  uint32_t given_ = 0;                // turns of workers that are behind, in the version under way
};

Status ServerExchange::set_version(uint64_t version) {
  if (endpoint_.stats().steps > 0) return unexpected("set_version: a step was taken already");
  version_ = version;
  for (Link& link : links_) link.pushed = link.sent = version;
  return {};
}

std::vector<uint32_t> ServerExchange::awaiting() const {
  if (done_) return {};
  if (scales_ && !scales_->complete()) return scales_->missing();
  std::vector<uint32_t> missing = worker_ranks(layout());
  std::erase_if(missing, [&](uint32_t worker) {
    return count_pushes(worker) > links_[worker].turns || !expects(worker);
  });
  return missing;
}

std::vector<uint32_t> ServerExchange::pushed() const {
  if (done_) return {};
  std::vector<uint32_t> here = worker_ranks(layout());
  std::erase_if(here, [&](uint32_t worker) { return count_pushes(worker) == 0; });
  return here;
}

Status ServerExchange::begin() {
  if (endpoint_.step() != version_) {
    return {StatusCode::kInvalidArgument, "start: version " + std::to_string(version_) +
                                              " is next, not " + std::to_string(endpoint_.step())};
  }
  done_ = false;
  next_ = added_ = given_ = 0;
  non_finite_.reset();
  GW_RETURN_IF_ERROR(advance());
  for (uint32_t worker : pushed()) GW_RETURN_IF_ERROR(give_turn(worker));
  return {};
}

Status ServerExchange::take(ReceivedPacket received) {
  if (scales_ && received.shard == scales_->number()) return take_scales(received);
  const uint32_t peer = received.peer;
  const uint64_t version = received.packet.header.step;
  const std::string which = name_of(peer) + " sent its push of version " + std::to_string(version);
  const bool is_empty = received.packet.frames.empty() && !received.packet.non_finite;
  if (received.is_push() && peer < workers() && received.shard == signals_ && is_empty) {
    GW_RETURN_IF_ERROR(send_missing(peer));
    trim_history();
    return {};
  }
  if (!received.is_push() || peer >= workers() || received.shard != rank()) {
    return unexpected(name_of(peer) + " sent what a server has no use for");
  }
  Link& link = links_[peer];
  if (version < version_) return drop(peer, version);
  const auto earlier = link.pushes.find(version);
  const size_t turns = version == version_ ? link.turns : 0;
  if (earlier != link.pushes.end() && earlier->second.size() > turns) {
    return unexpected(which + " twice");
  }
  if (version > link.sent + options_.staleness) {
    return unexpected(which + ", but was sent no version above " + std::to_string(link.sent) +
                      ", and may be " + std::to_string(options_.staleness) + " ahead");
  }
  if (scales_ && !scales_sent_) return unexpected(which + " before it was sent the scales");
  link.pushed = std::max(link.pushed, version + 1);
  link.joins = false;
  received.keep();
  link.pushes[version].push_back(std::move(received));
  if (done_) return {};
  GW_RETURN_IF_ERROR(advance());
  return version == version_ ? give_turn(peer) : Status();
}

// A version has as many turns as workers take part. Those that were sent the version before have
// one each. (TensorFlow's SyncReplicasOptimizer has a queue of tokens for this.)
Status ServerExchange::give_turn(uint32_t worker) {
  if (options_.turns == ServerOptions::Turns::kOwn || done_) return {};
  const auto has_own = [&](const Link& link) { return link.lost || link.sent == version_; };
  if (std::ranges::count_if(links_, has_own) + given_ >= workers()) return {};
  ++given_;
  ++links_[worker].turns;
  return send_signal(endpoint_, signals_, worker, Direction::kPull, version_);
}

void ServerExchange::await_scales() {
  scales_sent_ = false;
  if (scales_) scales_->begin(worker_ranks(layout()), rank());
}

Status ServerExchange::take_scales(const ReceivedPacket& received) {
  if (!received.is_push() || received.peer >= workers() ||
      received.packet.header.step != version_) {
    return unexpected(name_of(received.peer) + " sent scales of version " +
                      std::to_string(received.packet.header.step) + ", but version " +
                      std::to_string(version_) + " is under way");
  }
  const ScaleRange own = scales_->shared().of_shard(rank());
  GW_RETURN_IF_ERROR(scales_->take(endpoint_, received, own));
  return done_ ? Status() : advance();
}

Status ServerExchange::share_scales() {
  scales_sent_ = true;
  if (!scales_->non_finite()) GW_RETURN_IF_ERROR(scales_->share(endpoint_, version_));
  GW_ASSIGN_OR_RETURN(std::span<const std::byte> packet,
                      scales_->packet(0, endpoint_, Direction::kPull, version_));
  for (uint32_t worker = 0; worker < workers(); ++worker) {
    endpoint_.send_scales(worker, Direction::kPull, packet);
  }
  return {};
}

Status ServerExchange::drop(uint32_t worker, uint64_t version) {
  if (options_.backup == 0) {
    return unexpected(name_of(worker) + " sent its push of version " + std::to_string(version) +
                      ", but version " + std::to_string(version_) + " is under way");
  }
  ++dropped_[worker];
  links_[worker].joins = false;
  links_[worker].pushed = std::max(links_[worker].pushed, version + 1);
  GW_RETURN_IF_ERROR(send_missing(worker));
  trim_history();
  return {};
}

Status ServerExchange::advance() {
  if (scales_ && !scales_sent_) return scales_->complete() ? share_scales() : Status();
  // Pushes are added in the order of workers. Which workers are left out is known only when the
  // version ends; until then, adding stops at the first worker whose push is missing.
  for (; next_ < workers() && count_pushes(next_) > 0; ++next_) {
    GW_RETURN_IF_ERROR(add(links_[next_].pushes.at(version_).front()));
  }
  size_t here = 0;
  size_t expected = 0;
  for (uint32_t worker = 0; worker < workers(); ++worker) {
    here += count_pushes(worker);
    expected += count_pushes(worker) > 0 || expects(worker) ? 1 : 0;
  }
  return here == 0 || here + options_.backup < expected ? Status() : finish_version();
}

Status ServerExchange::add(const ReceivedPacket& push) {
  if (!non_finite_) non_finite_ = push.packet.non_finite;
  const DecodeMode mode = added_++ == 0 ? DecodeMode::kStore : DecodeMode::kAdd;
  return non_finite_ ? Status() : endpoint_.decode(rank(), push.packet, mode);
}

Status ServerExchange::finish_version() {
  for (; next_ < workers(); ++next_) {
    if (count_pushes(next_) > 0) {
      GW_RETURN_IF_ERROR(add(links_[next_].pushes.at(version_).front()));
    }
  }
  for (const Link& link : links_) {  // the pushes of further turns come last
    const auto found = link.pushes.find(version_);
    if (found == link.pushes.end()) continue;
    for (const ReceivedPacket& push : std::span(found->second).subspan(1)) {
      GW_RETURN_IF_ERROR(add(push));
    }
  }
  GW_RETURN_IF_ERROR(update_and_encode());
  const std::span<const std::byte> packet = endpoint_.finish(rank(), non_finite_);
  history_.push_back(std::make_shared<const std::vector<std::byte>>(packet.begin(), packet.end()));
  if (non_finite_) endpoint_.mark_non_finite(rank(), *non_finite_);
  const uint64_t finished = version_++;
  done_ = true;
  await_scales();
  for (uint32_t worker = 0; worker < workers(); ++worker) {
    links_[worker].pushes.erase(finished);
    links_[worker].turns = 0;
    if (links_[worker].pushed > finished) GW_RETURN_IF_ERROR(send_missing(worker));
  }
  trim_history();
  return {};
}

Status ServerExchange::update_and_encode() {
  const uint32_t own[] = {rank()};
  if (!non_finite_) {
    endpoint_.divide(own[0], static_cast<float>(added_));
    GW_ASSIGN_OR_RETURN(non_finite_, endpoint_.find_non_finite(own));
  }
  if (non_finite_) return {};
  if (update_) GW_RETURN_IF_ERROR(update_(endpoint_.bucket()));
  GW_ASSIGN_OR_RETURN(FirstNonFinite origin, endpoint_.encode(own, own));
  if (!origin) return {};
  // Unlike a gradient, this can't be skipped: the model itself is no longer finite.
  const Segment& segment = endpoint_.layout().segments()[origin->segment];
  return {StatusCode::kNonFinite, "the update of version " + std::to_string(version_) + " on " +
                                      name_of(own[0]) + " made tensor '" +
                                      endpoint_.layout().tensors()[segment.tensor].name +
                                      "' not finite"};
}

std::vector<uint32_t> ServerExchange::behind() const {
  std::vector<uint32_t> found = worker_ranks(layout());
  std::erase_if(found, [&](uint32_t worker) { return !links_[worker].behind; });
  return found;
}

Status ServerExchange::caught_up(uint32_t worker) {
  if (worker >= workers() || !links_[worker].behind) {
    return {StatusCode::kInvalidArgument, name_of(worker) + " is not behind"};
  }
  links_[worker].behind = false;
  links_[worker].sent = version_;
  return {};
}

Status ServerExchange::lose(uint32_t worker) {
  if (worker >= workers()) {
    return {StatusCode::kInvalidArgument, name_of(worker) + " is no worker"};
  }
  if (scales_) {
    return {StatusCode::kInvalidArgument,
            name_of(worker) + " can't be left out: trits with shared scales need all workers"};
  }
  Link& link = links_[worker];
  link.lost = true;
  link.behind = link.joins = false;
  std::erase_if(link.pushes, [&](const auto& push) { return push.first > version_; });
  return done_ ? Status() : advance();
}

Status ServerExchange::join(uint32_t worker, uint64_t first) {
  const auto invalid = [&](const std::string& what) {
    return Status(StatusCode::kInvalidArgument, name_of(worker) + " can't join: " + what);
  };
  if (worker >= workers()) return invalid("it is no worker");
  Link& link = links_[worker];
  if (!link.lost && !link.joins) return invalid("it takes part already");
  if (first < (link.lost ? version_ : link.first)) {
    return invalid("version " + std::to_string(first) + " is finished");
  }
  if (link.lost) {
    if (!done_) return unexpected(name_of(worker) + " joins, but a version is under way");
    link = Link();
    link.sent = version_;
    link.joins = true;
  }
  link.first = link.pushed = first;
  GW_RETURN_IF_ERROR(send_missing(worker));
  return done_ ? Status() : advance();
}

Status ServerExchange::send_missing(uint32_t worker) {
  Link& link = links_[worker];
  if (link.lost) return {};
  const uint64_t oldest = version_ - history_.size();
  if (link.sent < oldest) {
    if (options_.behind == ServerOptions::Behind::kReport) {
      link.behind = true;
      return {};
    }
    return {StatusCode::kLimitExceeded, name_of(worker) + " is " +
                                            std::to_string(version_ - link.sent) +
                                            " versions behind; the server keeps the last " +
                                            std::to_string(history_.size()) + " (history)"};
  }
  for (uint64_t version = version_; version-- > link.sent;) {
    endpoint_.send(worker, Direction::kPull, history_[version - oldest]);
    endpoint_.stats().values_sent += endpoint_.values_in(rank());
  }
  link.sent = version_;
  return {};
}

void ServerExchange::trim_history() {
  uint64_t needed = version_;
  for (const Link& link : links_) {
    if (!link.lost) needed = std::min(needed, link.sent);
  }
  while (history_.size() > std::min(version_ - needed, options_.history)) history_.pop_front();
}

}  // namespace

Result<std::unique_ptr<Exchange>> make_server_side(ExchangeSetup setup,
                                                   const ServerOptions& options) {
  if (setup.options.apply) {
    return Status(StatusCode::kInvalidArgument,
                  "server " + name_of(setup.rank) + ": only workers apply what they pull");
  }
  GW_ASSIGN_OR_RETURN(ServerEnd end,
                      make_server_end(setup, server_ranks(*setup.layout), "server", options));
  return std::unique_ptr<Exchange>(
      std::make_unique<ServerExchange>(std::move(end), options, std::move(setup.options.update)));
}

}  // namespace gradwire
