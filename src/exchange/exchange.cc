#include "gradwire/exchange.h"

#include <utility>

#include "base/parse.h"
#include "exchange/steps/exchange_entry.h"
#include "exchange/steps/packet_exchange.h"

namespace gradwire {

std::string describe(const NonFiniteInput& found, std::string_view values) {
  return std::string(values) + " of " + name_of(found.rank) + " is not finite at element " +
         std::to_string(found.element) + " of " + found.tensor;
}

Status check_start(const Exchange& exchange, uint64_t values) {
  if (!exchange.done()) return unexpected("start: the step before has not ended");
  const uint64_t expected = exchange.layout().numel();
  if (values == expected) return {};
  return {StatusCode::kLengthMismatch, "start: the layout has " + std::to_string(expected) +
                                           " values, the bucket " + std::to_string(values)};
}

ExchangeSetup host_setup(std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
                         ExchangeOptions options) {
  return {.layout = std::move(layout),
          .rank = rank,
          .codecs = host_shard_codecs(std::move(execution)),
          .options = std::move(options)};
}

Result<std::unique_ptr<Exchange>> make_exchange(std::string_view text,
                                                std::shared_ptr<const Layout> layout, uint32_t rank,
                                                Execution execution, ExchangeOptions options) {
  return make_exchange(
      text, host_setup(std::move(layout), rank, std::move(execution), std::move(options)));
}

Result<std::unique_ptr<Exchange>> make_reduce_scatter_exchange(std::shared_ptr<const Layout> layout,
                                                               uint32_t rank, Execution execution,
                                                               const ExchangeOptions& options) {
  return make_reduce_scatter_exchange(
      host_setup(std::move(layout), rank, std::move(execution), options));
}

Result<std::unique_ptr<Exchange>> make_allgather_exchange(std::shared_ptr<const Layout> layout,
                                                          uint32_t rank, Execution execution,
                                                          const ExchangeOptions& options) {
  return make_allgather_exchange(
      host_setup(std::move(layout), rank, std::move(execution), options));
}

Status compare_descriptions(uint32_t rank, std::string_view description, uint32_t peer,
                            std::string_view peer_description) {
  while (!description.empty() || !peer_description.empty()) {
    const std::string mine(description.empty() ? "nothing" : take_until(description, '\n'));
    const std::string theirs(peer_description.empty() ? "nothing"
                                                      : take_until(peer_description, '\n'));
    if (mine == theirs) continue;
    return {StatusCode::kPeerMismatch,
            "ranks " + std::to_string(rank) + " and " + std::to_string(peer) + " can't exchange: " +
                name_of(rank) + " has '" + mine + "', " + name_of(peer) + " has '" + theirs + "'"};
  }
  return {};
}

Status Exchange::check_size(uint32_t peer, uint64_t size) const {
  const uint64_t most = max_message_size();
  if (size <= most) return {};
  return {StatusCode::kLimitExceeded,
          name_of(peer) + " sends " + name_of(rank()) + " a message of " + std::to_string(size) +
              " bytes; no message of this exchange has more than " + std::to_string(most)};
}

Status Exchange::check_peer(uint32_t peer, std::string_view description) const {
  return compare_descriptions(rank(), describe(), peer, description);
}

}  // namespace gradwire
