#include <utility>

#include "base/return_if_error.h"
#include "exchange/steps/exchange_entry.h"
#include "exchange/steps/packet_exchange.h"
#include "exchange/steps/sharded_steps.h"

namespace gradwire {
namespace {

Result<std::unique_ptr<Exchange>> make(ExchangeSetup setup, const std::string& name, Legs legs) {
  GW_RETURN_IF_ERROR(check_rank(*setup.layout, setup.rank));
  GW_ASSIGN_OR_RETURN(Endpoint endpoint, Endpoint::create(setup, describe_exchange(setup, name)));
  return std::unique_ptr<Exchange>(std::make_unique<PacketExchange<ShardedSteps>>(
      std::move(endpoint), legs, std::move(setup.options.update)));
}

constexpr ExchangeInfo kInfo = {
    .name = "sharded",
    .summary = "every rank averages a part of the bucket and sends it to the others",
    .source = "3LC, section 3: servers, co-located with the workers",
    .updates = true};

}  // namespace

const ExchangeEntry exchange_entries::sharded = {
    &kInfo, [](const ExchangeChoice&, ExchangeSetup& setup) {
      const char* name = setup.options.update ? "sharded, with updates" : "sharded";
      return make(std::move(setup), name, Legs::kPushAndPull);
    }};

Result<std::unique_ptr<Exchange>> make_reduce_scatter_exchange(ExchangeSetup setup) {
  return make(std::move(setup), "reduce-scatter", Legs::kPush);
}

Result<std::unique_ptr<Exchange>> make_allgather_exchange(ExchangeSetup setup) {
  return make(std::move(setup), "allgather", Legs::kPull);
}

}  // namespace gradwire
