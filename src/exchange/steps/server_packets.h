#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exchange/steps/endpoint.h"
#include "exchange/steps/packet_exchange.h"
#include "exchange/steps/scale_round.h"
#include "gradwire/server.h"

namespace gradwire {

// The ranks of one side, in ascending order.
std::vector<uint32_t> worker_ranks(const Layout& layout);
std::vector<uint32_t> server_ranks(const Layout& layout);

// What either side is made of.
struct ServerEnd {
  Endpoint endpoint;
  std::optional<ScaleRound> scales;  // nothing: no trits have shared scales
  // The number of the packets without frames: a server gives a worker another turn with one, and a
  // worker that holds back its push asks for the versions that it lacks.
  uint32_t signals = 0;
};

// Sends a packet without frames, number `signals`.
Status send_signal(Endpoint& endpoint, uint32_t signals, uint32_t peer, Direction direction,
                   uint64_t version);

// Makes the end of a rank of `side`. kInvalidArgument: the rank is of the other side, or the
// options are invalid, or do not go with the layout's codecs.
Result<ServerEnd> make_server_end(ExchangeSetup setup, const std::vector<uint32_t>& side,
                                  const std::string& noun, const ServerOptions& options);

Result<std::unique_ptr<Exchange>> make_server_side(ExchangeSetup setup,
                                                   const ServerOptions& options);
Result<std::unique_ptr<Exchange>> make_worker_side(ExchangeSetup setup,
                                                   const ServerOptions& options);

}  // namespace gradwire
