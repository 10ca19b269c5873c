#include "exchange/steps/server_packets.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/return_if_error.h"
#include "exchange/steps/pulled_sums.h"

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
  if (setup.layout->servers() == 0) return invalid("the layout has no servers");
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
  std::string name = "server, backup workers " + std::to_string(options.backup) + ", staleness " +
                     std::to_string(options.staleness);
  if (options.pulls != ServerOptions::Pulls::kGradients) {
    GW_ASSIGN_OR_RETURN(Endpoint endpoint, Endpoint::create(setup, describe_exchange(setup, name)));
    return ServerEnd{.endpoint = std::move(endpoint), .scales = {}};
  }
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
  GW_ASSIGN_OR_RETURN(Endpoint endpoint, Endpoint::create(setup, describe_exchange(setup, name)));
  ServerEnd end = {.endpoint = std::move(endpoint), .scales = {}};
  if (!shares) return end;
  GW_ASSIGN_OR_RETURN(end.scales, ScaleRound::create(end.endpoint, here));
  for (uint32_t server : server_ranks(*setup.layout)) {
    if (setup.rank < setup.layout->workers() || setup.rank == server) {
      GW_RETURN_IF_ERROR(end.scales->add_packet(end.scales->shared().of_shard(server)));
    }
  }
  return end;
}

Result<std::unique_ptr<WorkerSide>> make_server_worker(std::shared_ptr<const Layout> layout,
                                                       uint32_t rank, Execution execution,
                                                       const ServerOptions& options,
                                                       ApplyDelta apply, uint64_t seed) {
  return make_server_worker(
      host_setup(std::move(layout), rank, std::move(execution), {.seed = seed}), options,
      std::move(apply));
}

Result<std::unique_ptr<ServerSide>> make_server(std::shared_ptr<const Layout> layout, uint32_t rank,
                                                Execution execution, const ServerOptions& options,
                                                ShardUpdate update, uint64_t seed) {
  return make_server(host_setup(std::move(layout), rank, std::move(execution),
                                {.seed = seed, .update = std::move(update)}),
                     options);
}

}  // namespace gradwire
