#include "engines/simulated/make_exchanges.h"

#include <string>
#include <utility>

#include "base/return_if_error.h"
#include "exchange/steps/exchange_entry.h"
#include "gradwire/exchange_choice.h"

namespace gradwire {
namespace {

Status invalid(const std::string& what) { return {StatusCode::kInvalidArgument, what}; }

// The machine of each rank, for exchanges between machines; empty for others, and if the exchange
// knows them.
std::vector<uint32_t> machines_of_ranks(const SimulationOptions& options,
                                        const ExchangeChoice& choice) {
  std::vector<uint32_t> machines;
  if (!choice.info().between_machines || choice.ranks_per_machine() != 0) return machines;
  for (uint32_t r = 0; r < options.ranks; ++r) {
    machines.push_back(r / options.network.ranks_per_machine);
  }
  return machines;
}

// Whether the rank is a server with a model, which it changes by the averages.
bool has_model(const ExchangeChoice& choice, const Layout& layout, uint32_t rank) {
  return choice.info().has_servers && rank >= layout.workers() &&
         choice.server().pulls == ServerOptions::Pulls::kUpdates;
}

// The ranks of a layout: for exchanges between machines, the machines.
Result<uint32_t> world_size_of(const SimulationOptions& options) {
  GW_ASSIGN_OR_RETURN(const ExchangeChoice choice, ExchangeChoice::parse(options.exchange));
  const uint32_t size = options.network.ranks_per_machine;
  if (choice.ranks_per_machine() != 0 && choice.ranks_per_machine() != size) {
    return invalid(options.exchange + " on machines of " + std::to_string(size) + " ranks");
  }
  return choice.info().between_machines ? (options.ranks + size - 1) / size : options.ranks;
}

}  // namespace

Result<uint32_t> servers_of(const SimulationOptions& options) {
  GW_ASSIGN_OR_RETURN(const ExchangeChoice choice, ExchangeChoice::parse(options.exchange));
  if (!choice.info().has_servers) return 0u;
  if (choice.server().backup > 0 || choice.server().staleness > 0) {
    return invalid(options.exchange +
                   ": servers are simulated in lockstep, without backup workers " +
                   "and staleness");
  }
  const uint32_t servers = options.buckets[0].layout->servers();
  if (servers == 0)
    return invalid("the exchange " + options.exchange + " and no servers in layouts");
  if (servers >= options.ranks) return invalid("no ranks but servers: a simulation needs workers");
  return servers;
}

Status check_layouts(const SimulationOptions& options) {
  GW_ASSIGN_OR_RETURN(const uint32_t world, world_size_of(options));
  const uint32_t servers = options.network.ranks_alone;
  for (const SimulatedBucket& bucket : options.buckets) {
    const Layout& layout = *bucket.layout;
    if (layout.world_size() != world) {
      return invalid("the layout is of " + std::to_string(layout.world_size()) +
                     " ranks or machines, the simulation of " + std::to_string(world));
    }
    if (layout.servers() != servers) {
      return invalid("the layout has " + std::to_string(layout.servers()) +
                     " servers, the simulation of " + options.exchange + " has " +
                     std::to_string(servers));
    }
  }
  return {};
}

Result<std::vector<std::unique_ptr<Exchange>>> make_exchanges(const SimulationOptions& options,
                                                              uint32_t rank,
                                                              const ShardCodecFactory& codecs) {
  GW_ASSIGN_OR_RETURN(const ExchangeChoice choice, ExchangeChoice::parse(options.exchange));
  std::vector<std::unique_ptr<Exchange>> exchanges;
  for (const SimulatedBucket& bucket : options.buckets) {
    ExchangeSetup setup = {.layout = bucket.layout, .rank = rank, .codecs = codecs, .options = {}};
    setup.options.seed = options.seed;
    setup.options.machine_of_rank = machines_of_ranks(options, choice);
    if (has_model(choice, *bucket.layout, rank)) {
      setup.options.update = [](std::span<float>) { return Status(); };
    }
    GW_ASSIGN_OR_RETURN(std::unique_ptr<Exchange> exchange,
                        make_exchange(options.exchange, std::move(setup)));
    exchanges.push_back(std::move(exchange));
  }
  return exchanges;
}

}  // namespace gradwire
