#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "gradwire/exchange_choice.h"
#include "gradwire/export.h"

namespace gradwire {

// A bucket, and the ranks that exchange it. Bytes are those of all values, without headers.
struct ExchangeVolume {
  uint32_t ranks;        // that push: all ranks, or the workers
  uint32_t servers = 0;  // their numbers follow those of the workers
  double values = 0;
  double push_bytes = 0;
  double pull_bytes = 0;
  std::optional<double> scale_bytes = {};  // nothing: no trits share scales
  // Each owner's share of the values and bytes: of each server, or of each rank. Together they are
  // 1. Empty: all own as much.
  std::vector<double> shares = {};
};

// What a rank does for one bucket.
struct ExchangeCost {
  uint64_t messages = 0;  // on the longest way, which wait for each other; the same for all ranks
  uint64_t messages_sent = 0;
  uint64_t messages_received = 0;
  double bytes_sent = 0;
  double bytes_received = 0;
  double values_encoded = 0;
  double values_decoded = 0;  // those that are added to a sum included
};

// The cost to `rank` of an exchange. For an exchange between machines: that to the speaker of a
// machine, among as many `ranks` as there are machines; it does not include what happens inside.
// `rank` is below ranks + servers, and `shares` is empty or has one for each owner
// (kInvalidArgument otherwise).
[[nodiscard]] GRADWIRE_EXPORT Result<ExchangeCost> cost_of(const ExchangeChoice& choice,
                                                           const ExchangeVolume& volume,
                                                           uint32_t rank);

}  // namespace gradwire
