#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "gradwire/exchange.h"
#include "gradwire/status.h"

namespace gradwire {

// What happens to a message on its way.
enum class Delivery : uint8_t { kOnce, kTwice, kLost };

struct LoopbackOptions {
  // Messages in flight are delivered in an order drawn from this seed, across all pairs of ranks.
  uint64_t seed = 0;
  // Asked for every message; absent: all are delivered once.
  std::function<Delivery(uint32_t source, uint32_t target, uint64_t message_index)> delivery;
};

// Runs one step of all ranks in this process: exchanges[r] works on buckets[r]. Returns the first
// failure of any rank; kTruncated naming a rank that waits for a message which never comes.
Status run_loopback_step(std::span<Exchange* const> exchanges,
                         std::span<const std::span<float>> buckets, uint64_t step,
                         const LoopbackOptions& options = {});

}  // namespace gradwire
