#include "gradwire/exchange_cost.h"

#include <string>

namespace gradwire {
namespace {

// The ranks of an exchange as one of them sees them.
class View {
 public:
  View(const ExchangeVolume& volume, uint32_t rank)
      : volume_(volume),
        rank_(rank),
        owners_(volume.servers > 0 ? volume.servers : volume.ranks),
        first_owner_(volume.servers > 0 ? volume.ranks : 0) {}

  [[nodiscard]] uint32_t ranks() const { return volume_.ranks; }
  [[nodiscard]] bool pushes() const { return rank_ < volume_.ranks; }
  [[nodiscard]] bool owns() const { return rank_ >= first_owner_; }
  // How many ranks push to this rank, and how many owners it pulls from.
  [[nodiscard]] uint32_t other_ranks() const { return volume_.ranks - (pushes() ? 1 : 0); }
  [[nodiscard]] uint32_t other_owners() const { return owners_ - (owns() ? 1 : 0); }
  [[nodiscard]] double share() const { return owns() ? share_of(rank_) : 0.0; }
  [[nodiscard]] double share_of_left() const { return share_of((rank_ + ranks() - 1) % ranks()); }
  [[nodiscard]] double share_of_right() const { return share_of((rank_ + 1) % ranks()); }

 private:
  [[nodiscard]] double share_of(uint32_t owner) const {
    return volume_.shares.empty() ? 1.0 / owners_ : volume_.shares[owner - first_owner_];
  }

  const ExchangeVolume& volume_;
  uint32_t rank_;
  uint32_t owners_;
  uint32_t first_owner_;
};

// What a leg moves and computes: messages, and shares of the whole bucket.
struct Load {
  uint64_t messages = 1;
  uint64_t sent = 0;
  uint64_t received = 0;
  double share_sent = 0;
  double share_received = 0;
  double encoded = 0;
  double decoded = 0;
};

Load to_owners(const View& view) {
  const double received = view.owns() ? view.other_ranks() * view.share() : 0.0;
  Load load = {.received = view.owns() ? view.other_ranks() : 0u,
               .share_received = received,
               .decoded = received};
  if (view.pushes()) {
    load.sent = view.other_owners();
    load.share_sent = load.encoded = 1 - view.share();
  }
  return load;
}

Load from_owners(const View& view) {
  Load load;
  if (view.owns()) {
    load.sent = view.other_ranks();
    load.share_sent = view.other_ranks() * view.share();
    load.encoded = view.share();
  }
  if (view.pushes()) {
    load.received = view.other_owners();
    load.share_received = load.decoded = 1 - view.share();
  }
  return load;
}

Load around(const View& view, Direction direction) {
  const uint64_t hops = view.ranks() - 1;
  const bool push = direction == Direction::kPush;
  const double sent = 1 - (push ? view.share() : view.share_of_right());
  const double received = 1 - (push ? view.share_of_left() : view.share());
  return {.messages = hops,
          .sent = hops,
          .received = hops,
          .share_sent = sent,
          .share_received = received,
          .encoded = push ? sent : view.share(),
          .decoded = received};
}

Load to_all(const View& view) {
  const uint32_t others = view.ranks() - 1;
  return {.sent = others,
          .received = others,
          .share_sent = static_cast<double>(others),
          .share_received = static_cast<double>(others),
          .encoded = 1,
          .decoded = static_cast<double>(view.ranks())};
}

Load load_of(const ExchangeLeg& leg, const View& view) {
  switch (leg.route) {
    case Route::kToOwners:
      return to_owners(view);
    case Route::kFromOwners:
      return from_owners(view);
    case Route::kAround:
      return around(view, leg.direction);
    case Route::kToAll:
      return to_all(view);
  }
  return {};
}

Status check(const ExchangeInfo& info, const ExchangeVolume& volume, uint32_t rank) {
  const auto invalid = [&](const std::string& what) {
    return Status(StatusCode::kInvalidArgument,
                  "the cost of exchange " + std::string(info.name) + ": " + what);
  };
  if (volume.ranks == 0) return invalid("no ranks");
  if (info.has_servers != (volume.servers > 0)) {
    return invalid(info.has_servers ? "it has servers, but `servers` is 0"
                                    : "it has no servers, but `servers` is not 0");
  }
  if (rank >= volume.ranks + volume.servers) {
    return invalid("rank " + std::to_string(rank) + " of " +
                   std::to_string(volume.ranks + volume.servers));
  }
  const uint32_t owners = volume.servers > 0 ? volume.servers : volume.ranks;
  if (!volume.shares.empty() && volume.shares.size() != owners) {
    return invalid(std::to_string(volume.shares.size()) + " shares of " + std::to_string(owners) +
                   " owners");
  }
  return {};
}

}  // namespace

Result<ExchangeCost> cost_of(const ExchangeChoice& choice, const ExchangeVolume& volume,
                             uint32_t rank) {
  const ExchangeInfo& info = choice.inner();
  if (const Status status = check(info, volume, rank); !status.ok()) return status;
  ExchangeCost cost;
  if (volume.ranks + volume.servers == 1) return cost;  // a lone rank sends and encodes nothing
  const View view(volume, rank);
  const auto move = [&](const ExchangeLeg& leg, double bytes) {
    const Load load = load_of(leg, view);
    cost.messages += load.messages;
    cost.messages_sent += load.sent;
    cost.messages_received += load.received;
    cost.bytes_sent += load.share_sent * bytes;
    cost.bytes_received += load.share_received * bytes;
    return load;
  };
  if (volume.scale_bytes) {
    for (const ExchangeLeg& leg : info.scale_legs) (void)move(leg, *volume.scale_bytes);
  }
  for (const ExchangeLeg& leg : info.legs) {
    const bool push = leg.direction == Direction::kPush;
    const Load load = move(leg, push ? volume.push_bytes : volume.pull_bytes);
    cost.values_encoded += load.encoded * volume.values;
    cost.values_decoded += load.decoded * volume.values;
  }
  return cost;
}

}  // namespace gradwire
