#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "gradwire/codec.h"
#include "gradwire/export.h"
#include "gradwire/status.h"

namespace gradwire {

struct ExchangeInfo {
  std::string_view name;
  std::string_view summary;
  std::string_view source;  // paper and section
  // Gives the sum over the ranks where that is wanted, not the average alone.
  bool sums = true;
  // Its owners can turn averages into something else (ShardUpdate).
  bool updates = false;
  // A sum is encoded again at each rank on its way, so that its error and, with some codecs, its
  // scale grow with the number of ranks.
  bool encodes_sums_on_the_way = false;
  // Adds trits with scales that all ranks share. It takes terngrad, or codecs without residual.
  bool adds_trits = false;
  // All ranks skip a step that is not finite, also where no rank keeps a residual.
  bool always_skips_non_finite = false;
  // One rank of each machine exchanges for the others, as another exchange says.
  bool between_machines = false;
  std::span<const CodecParameter> parameters = {};
};

// Every exchange, in the order of src/exchange/exchanges.def.
[[nodiscard]] GRADWIRE_EXPORT std::span<const ExchangeInfo* const> exchanges() noexcept;

// An exchange with its parameters: "sharded", "hierarchical:between=ring,ranks=4".
class GRADWIRE_EXPORT ExchangeChoice {
 public:
  // kInvalidArgument listing what is valid.
  static Result<ExchangeChoice> parse(std::string_view text);

  [[nodiscard]] const ExchangeInfo& info() const noexcept { return *info_; }
  // What the ranks that compress do: `between` of a hierarchical exchange, else info().
  [[nodiscard]] const ExchangeInfo& inner() const noexcept { return *inner_; }
  // Of a hierarchical exchange; 0: not given.
  [[nodiscard]] uint32_t ranks_per_machine() const noexcept { return ranks_per_machine_; }
  // parse(text()) gives an equal choice.
  [[nodiscard]] std::string text() const;

 private:
  const ExchangeInfo* info_ = nullptr;
  const ExchangeInfo* inner_ = nullptr;
  uint32_t ranks_per_machine_ = 0;
};

}  // namespace gradwire
