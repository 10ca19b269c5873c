#include "exchange/steps/server_packets.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/return_if_error.h"
#include "exchange/steps/pulled_sums.h"
#include "exchange/steps/sharded.h"

namespace gradwire {
namespace {

std::vector<uint32_t> ranks_from(uint32_t first, uint32_t end) {
  std::vector<uint32_t> ranks(end - first);
  std::iota(ranks.begin(), ranks.end(), first);
  return ranks;
}

}  // namespace

std::vector<uint32_t> worker_ranks(const Layout& layout) { return ranks_from(0, layout.workers()); }

std::vector<uint32_t> server_ranks(const Layout& layout) {
  if (layout.owner()) return {*layout.owner()};
  return ranks_from(layout.workers(), layout.world_size());
}

Result<ServerEnd> make_server_end(ExchangeSetup setup, const std::vector<uint32_t>& side,
                                  const std::string& noun, const ServerOptions& options) {
  const auto invalid = [](const std::string& what) {
    return Status(StatusCode::kInvalidArgument, what);
  };
  if (setup.layout->servers() == 0) {
    return invalid("the server exchange needs a layout with servers");
  }
  if (!std::ranges::binary_search(side, setup.rank)) {
    return invalid(name_of(setup.rank) + " is no " + noun + "; those are ranks " +
                   std::to_string(side.front()) + " to " + std::to_string(side.back()));
  }
  const std::string workers = std::to_string(setup.layout->workers());
  if (options.backup >= setup.layout->workers()) {
    return invalid(std::to_string(options.backup) + " backup workers of " + workers +
                   " workers leave no push to wait for");
  }
  if (options.history <= options.staleness) {
    return invalid("a history of " + std::to_string(options.history) +
                   " versions is too short for workers that may be " +
                   std::to_string(options.staleness) + " behind");
  }
  const bool gives_turns = options.turns == ServerOptions::Turns::kAny;
  if (gives_turns && (options.backup == 0 || options.staleness > 0)) {
    return invalid(
        "turns=any gives the turns of late workers to others, which otherwise wait: "
        "backup must be at least 1, and staleness 0");
  }
  std::string name = "server, backup workers " + std::to_string(options.backup) +
                     (gives_turns ? ", turns of any" : "") + ", staleness " +
                     std::to_string(options.staleness);
  const auto make_end = [&]() -> Result<ServerEnd> {
    GW_ASSIGN_OR_RETURN(Endpoint endpoint, Endpoint::create(setup, describe_exchange(setup, name)));
    ServerEnd end = {.endpoint = std::move(endpoint), .scales = {}};
    end.signals = end.endpoint.add_round(PacketWriter::max_size({}));
    return end;
  };
  if (options.pulls != ServerOptions::Pulls::kGradients) return make_end();
  name += ", pulls of gradients";
  const std::string here = noun + " " + name_of(setup.rank) + ", pulls of gradients";
  const bool shares = std::ranges::any_of(setup.layout->segments(), pushes_trits);
  if (setup.options.update) return invalid(here + ": a server without a model takes no update");
  if (shares && (options.backup > 0 || options.staleness > 0)) {
    return invalid(here + ": codec terngrad needs the scales of all workers in each version; " +
                   "backup is " + std::to_string(options.backup) + " and staleness is " +
                   std::to_string(options.staleness) + ", valid is 0 for both");
  }
  if (shares) {
    GW_ASSIGN_OR_RETURN(Layout changed, with_pulled_sums(here, *setup.layout));
    setup.layout = std::make_shared<const Layout>(std::move(changed));
  }
  GW_ASSIGN_OR_RETURN(ServerEnd end, make_end());
  if (!shares) return end;
  GW_ASSIGN_OR_RETURN(end.scales, ScaleRound::create(end.endpoint, here));
  for (uint32_t server : server_ranks(*setup.layout)) {
    if (setup.rank < setup.layout->workers() || setup.rank == server) {
      GW_RETURN_IF_ERROR(end.scales->add_packet(end.scales->shared().of_shard(server)));
    }
  }
  return end;
}

Status send_signal(Endpoint& endpoint, uint32_t signals, uint32_t peer, Direction direction,
                   uint64_t version) {
  GW_ASSIGN_OR_RETURN(PacketWriter writer, PacketWriter::create({}));
  writer.begin({.direction = direction,
                .source = static_cast<uint16_t>(endpoint.ranks().own()),
                .step = version,
                .layout_digest = endpoint.digest(signals)});
  const std::span<const std::byte> packet = writer.finish();
  endpoint.send(peer, direction,
                std::make_shared<const std::vector<std::byte>>(packet.begin(), packet.end()));
  return {};
}

ServerSide* as_server(Exchange* exchange) { return dynamic_cast<ServerSide*>(exchange); }
WorkerSide* as_worker(Exchange* exchange) { return dynamic_cast<WorkerSide*>(exchange); }

namespace {

constexpr CodecParameter kParameters[] = {
    {"pulls", "updates", "updates|gradients", "what workers pull"},
    {"backup", "0", "WORKERS", "pushes that a version does not wait for"},
    {"turns", "own", "own|any", "whose pushes a version counts: one of each worker, or any"},
    {"staleness", "0", "VERSIONS", "how many a worker may have pushed and not pulled"},
    {"history", "64", "VERSIONS", "finished ones that are kept for late workers"},
    {"behind", "refuse", "refuse|report", "what happens to a worker that lacks more"},
};

constexpr ExchangeLeg kLegs[] = {{Route::kToOwners, Direction::kPush},
                                 {Route::kFromOwners, Direction::kPull}};

constexpr ExchangeInfo kInfo = {
    .name = "server",
    .summary = "workers push to dedicated servers and pull what these made of the average",
    .source = "3LC, sections 2 and 3",
    .default_codec = kShardedCodec,
    .sums = false,
    .updates = true,
    .always_skips_non_finite = true,
    .has_servers = true,
    .legs = kLegs,
    .scale_legs = kLegs,
    .parameters = kParameters};

Result<std::unique_ptr<Exchange>> make(const ExchangeChoice& choice, ExchangeSetup& setup) {
  const bool works = setup.rank < setup.layout->workers();
  return works ? make_worker_side(std::move(setup), choice.server())
               : make_server_side(std::move(setup), choice.server());
}

}  // namespace

const ExchangeEntry exchange_entries::server = {&kInfo, make};

}  // namespace gradwire
