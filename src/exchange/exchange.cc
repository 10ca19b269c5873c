#include "gradwire/exchange.h"

#include <iterator>
#include <utility>

namespace gradwire {
namespace {

std::string_view take_line(std::string_view& text) {
  const size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  return line;
}

constexpr std::string_view kNames[] = {"sharded", "ring", "terngrad"};

}  // namespace

std::string_view exchange_name(ExchangeKind kind) noexcept {
  return kNames[static_cast<size_t>(kind)];
}

Result<ExchangeKind> parse_exchange(std::string_view name) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<ExchangeKind>(i);
  }
  return Status(
      StatusCode::kInvalidArgument,
      "'" + std::string(name) + "' is no exchange; valid ones are: sharded, ring, terngrad");
}

Result<std::unique_ptr<Exchange>> make_exchange(ExchangeKind kind,
                                                std::shared_ptr<const Layout> layout, uint32_t rank,
                                                Execution execution, uint64_t seed,
                                                Reduction reduction) {
  switch (kind) {
    case ExchangeKind::kSharded:
      return make_sharded_exchange(std::move(layout), rank, std::move(execution), seed, {},
                                   reduction);
    case ExchangeKind::kRing:
      return make_ring_exchange(std::move(layout), rank, std::move(execution), seed, reduction);
    case ExchangeKind::kTernGrad:
      if (reduction == Reduction::kSum) {
        return Status(StatusCode::kInvalidArgument,
                      "the terngrad exchange averages; it can't give the sum");
      }
      return make_terngrad_exchange(layout, rank, std::move(execution), seed);
  }
  return Status(StatusCode::kInvalidArgument, "no such exchange");
}

Status compare_descriptions(uint32_t rank, std::string_view description, uint32_t peer,
                            std::string_view peer_description) {
  while (!description.empty() || !peer_description.empty()) {
    const std::string mine(description.empty() ? "nothing" : take_line(description));
    const std::string theirs(peer_description.empty() ? "nothing" : take_line(peer_description));
    if (mine == theirs) continue;
    const std::string here = "rank " + std::to_string(rank);
    const std::string there = "rank " + std::to_string(peer);
    return {StatusCode::kPeerMismatch,
            "ranks " + std::to_string(rank) + " and " + std::to_string(peer) + " can't exchange: " +
                here + " has '" + mine + "', " + there + " has '" + theirs + "'"};
  }
  return {};
}

Status Exchange::check_peer(uint32_t peer, std::string_view description) const {
  return compare_descriptions(rank(), describe(), peer, description);
}

}  // namespace gradwire
