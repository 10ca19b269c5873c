#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "gradwire/exchange.h"
#include "gradwire/status.h"

namespace gradwire {

// How often a message is delivered.
enum class Delivery : uint8_t { kOnce, kTwice, kLost };

struct LoopbackOptions {
  // Messages in flight are delivered in an order drawn from this seed, across all pairs of ranks.
  uint64_t seed = 0;
  // Called for every message. Without it all messages are delivered once.
  std::function<Delivery(uint32_t source, uint32_t target, uint64_t message_index)> delivery;
};

struct LoopbackStep {
  std::span<float> bucket;
  uint64_t number;
};

struct LoopbackRun {
  // What happens next is drawn from this seed: a rank that is done takes its next step, or one of
  // the messages in flight, between any two ranks, is delivered.
  uint64_t seed = 0;
  // The next step of a rank that is done; nothing when it has taken its last.
  std::function<std::optional<LoopbackStep>(uint32_t rank)> next;
  // A rank for which this returns true takes no step and no message now. `tick` counts the draws.
  // Without it no rank stalls.
  std::function<bool(uint32_t rank, uint64_t tick)> stalled;
};

// Runs all ranks in this process, each at its own pace, until there is nothing left to do. Returns
// the first failure of any rank; kTruncated naming a rank that waits for a message which never
// comes. A rank that takes messages from any rank (a server) may end waiting.
Status run_loopback(std::span<Exchange* const> exchanges, const LoopbackRun& run);

// Runs one step of all ranks in this process: exchanges[r] works on buckets[r]. Returns the first
// failure of any rank; kTruncated naming a rank that waits for a message which never comes.
Status run_loopback_step(std::span<Exchange* const> exchanges,
                         std::span<const std::span<float>> buckets, uint64_t step,
                         const LoopbackOptions& options = {});

}  // namespace gradwire
