#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/private_export.h"
#include "exchange/shards/shard_codec.h"
#include "gradwire/exchange.h"
#include "gradwire/exchange_choice.h"

namespace gradwire {

// Whom the markers of an exchange name if it is a leg of another exchange, whose ranks have numbers
// of their own.
struct Origins {
  std::vector<uint32_t> outer_ranks;  // by this exchange's rank; empty: they are the same
  std::vector<uint32_t> leg_ranks;    // by the outer rank: this exchange's rank that speaks for it
  // What an earlier leg found, by the outer rank. This rank then sends markers of it alone.
  std::shared_ptr<const std::optional<NonFiniteInput>> known;
};

// What an exchange is made of.
struct ExchangeSetup {
  std::shared_ptr<const Layout> layout;
  uint32_t rank;
  ShardCodecFactory codecs;
  ExchangeOptions options;
  Origins origins = {};
  // Whether this rank looks for NaN and Inf although no rank keeps a residual.
  bool marks_non_finite = false;
};

// The setup for buckets in the memory of the host.
ExchangeSetup host_setup(std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
                         ExchangeOptions options);

// The entry that an exchange's file defines. Exchanges are listed in exchanges.def, not
// self-registered: a static library would drop a registration that nobody refers to.
struct ExchangeEntry {
  const ExchangeInfo* info;
  // The setup's options were already checked against `info`.
  Result<std::unique_ptr<Exchange>> (*make)(const ExchangeChoice& choice, ExchangeSetup& setup);
  // Its leg from the owners to all ranks alone. Null: each owner sends to every other rank.
  Result<std::unique_ptr<Exchange>> (*make_allgather)(ExchangeSetup& setup) = nullptr;
};

namespace exchange_entries {
#define GW_EXCHANGE(symbol) extern const ExchangeEntry symbol;
#include "exchange/exchanges.def"
#undef GW_EXCHANGE
}  // namespace exchange_entries

// As in gradwire/exchange.h, for buckets in whatever memory the shard codecs support.
GW_PRIVATE_EXPORT Result<std::unique_ptr<Exchange>> make_exchange(std::string_view text,
                                                                  ExchangeSetup setup);
// Makes the exchange `info`: that of the choice itself, or its inner exchange (choice.inner()).
Result<std::unique_ptr<Exchange>> make_exchange(const ExchangeInfo& info,
                                                const ExchangeChoice& choice, ExchangeSetup setup);

// The last leg of the exchange `info`, or of the sharded exchange if it is null or has none.
Result<std::unique_ptr<Exchange>> make_allgather_exchange(const ExchangeInfo* info,
                                                          ExchangeSetup setup);

// The legs of the sharded exchange alone (gradwire/exchange.h).
Result<std::unique_ptr<Exchange>> make_reduce_scatter_exchange(ExchangeSetup setup);
Result<std::unique_ptr<Exchange>> make_allgather_exchange(ExchangeSetup setup);

}  // namespace gradwire
