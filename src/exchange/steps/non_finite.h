#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "exchange/shards/shard_codec.h"
#include "exchange/steps/exchange_entry.h"
#include "gradwire/exchange.h"

namespace gradwire {

// Where the values of a step come from that are NaN or Inf, in the ranks' numbers of markers and in
// those of this exchange.
class NonFiniteOrigins {
 public:
  NonFiniteOrigins() = default;
  NonFiniteOrigins(std::shared_ptr<const Shards> shards, Origins origins)
      : shards_(std::move(shards)), origins_(std::move(origins)) {}

  // Begins a step.
  void begin() { first_.reset(); }
  // Takes an origin, which may have come from another rank and be wrong. true: the step's first.
  bool note(const NonFiniteOrigin& origin);
  // The step's first.
  [[nodiscard]] const std::optional<NonFiniteInput>& first() const { return first_; }

  // What an earlier leg found, with the rank's number in markers.
  [[nodiscard]] FirstNonFinite known() const;
  // An origin of this exchange with the rank's number in markers.
  [[nodiscard]] FirstNonFinite in_marker(FirstNonFinite origin) const;
  // The number in markers of a rank of this exchange.
  [[nodiscard]] uint32_t outer_rank(uint32_t rank) const;
  // The rank of this exchange that brought the value; its number of ranks if there is none.
  [[nodiscard]] uint32_t leg_rank(const NonFiniteOrigin& origin) const;

 private:
  std::shared_ptr<const Shards> shards_;
  Origins origins_;
  std::optional<NonFiniteInput> first_;
};

}  // namespace gradwire
