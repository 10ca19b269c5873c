#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engines/simulated/simulation.h"
#include "exchange/shards/shard_codec.h"
#include "gradwire/exchange.h"
#include "gradwire/status.h"

namespace gradwire {

// The number of servers of the options' exchange, which the first layout has; 0 for exchanges
// without servers. kInvalidArgument: there are none though the exchange needs them, or no workers.
Result<uint32_t> servers_of(const SimulationOptions& options);

// kInvalidArgument: a layout is not for the options' exchange, ranks, machines and servers.
// network.ranks_alone is servers_of(options).
Status check_layouts(const SimulationOptions& options);

// The exchange of each bucket for one rank, for options that were checked. Codecs are made by
// `codecs`.
Result<std::vector<std::unique_ptr<Exchange>>> make_exchanges(const SimulationOptions& options,
                                                              uint32_t rank,
                                                              const ShardCodecFactory& codecs);

}  // namespace gradwire
