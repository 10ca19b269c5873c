#include "engines/loopback/loopback.h"

#include <cstddef>
#include <random>
#include <string>
#include <utility>

#include "base/return_if_error.h"

namespace gradwire {
namespace {

// A run ends after so many draws in a row without effect; no useful stall lasts as long.
constexpr uint64_t kIdleTicks = 1'000'000;

// A message in flight, which keeps its bytes alive.
struct InFlight {
  uint32_t source;
  OutgoingMessage sent;

  InFlight(uint32_t from, OutgoingMessage message) : source(from), sent(std::move(message)) {
    if (sent.keep) return;
    const auto copy =
        std::make_shared<const std::vector<std::byte>>(sent.bytes.begin(), sent.bytes.end());
    sent = {.peer = sent.peer, .bytes = *copy, .keep = copy};
  }
  [[nodiscard]] Status deliver(std::span<Exchange* const> exchanges) const {
    Exchange& receiver = *exchanges[sent.peer];
    GW_RETURN_IF_ERROR(receiver.check_size(source, sent.bytes.size()));
    return receiver.receive(source, sent.bytes);
  }
};

Status still_waits(uint32_t rank, const Exchange& exchange) {
  return {StatusCode::kTruncated, "rank " + std::to_string(rank) + " still waits for rank " +
                                      std::to_string(exchange.awaiting().front())};
}

// Removes and returns a random message of those in flight.
InFlight draw(std::vector<InFlight>& in_flight, std::mt19937_64& random) {
  std::swap(in_flight[random() % in_flight.size()], in_flight.back());
  InFlight message = std::move(in_flight.back());
  in_flight.pop_back();
  return message;
}

}  // namespace

Status run_loopback_step(std::span<Exchange* const> exchanges,
                         std::span<const std::span<float>> buckets, uint64_t step,
                         const LoopbackOptions& options) {
  std::mt19937_64 random(options.seed);
  std::vector<InFlight> in_flight;
  uint64_t sent = 0;
  const auto collect = [&](uint32_t source) {
    for (const OutgoingMessage& message : exchanges[source]->take_outgoing()) {
      const Delivery delivery =
          options.delivery ? options.delivery(source, message.peer, sent) : Delivery::kOnce;
      ++sent;
      const int copies = delivery == Delivery::kLost ? 0 : delivery == Delivery::kTwice ? 2 : 1;
      for (int i = 0; i < copies; ++i) in_flight.emplace_back(source, message);
    }
  };
  for (uint32_t rank = 0; rank < exchanges.size(); ++rank) {
    GW_RETURN_IF_ERROR(exchanges[rank]->start(buckets[rank], step));
    collect(rank);
  }
  while (!in_flight.empty()) {
    const InFlight message = draw(in_flight, random);
    GW_RETURN_IF_ERROR(message.deliver(exchanges));
    collect(message.sent.peer);
  }
  for (uint32_t rank = 0; rank < exchanges.size(); ++rank) {
    if (!exchanges[rank]->done()) return still_waits(rank, *exchanges[rank]);
  }
  return {};
}

Status run_loopback(std::span<Exchange* const> exchanges, const LoopbackRun& run) {
  std::mt19937_64 random(run.seed);
  std::vector<InFlight> in_flight;
  std::vector<bool> ended(exchanges.size());
  const auto collect = [&](uint32_t source) {
    for (const OutgoingMessage& message : exchanges[source]->take_outgoing()) {
      in_flight.emplace_back(source, message);
    }
  };
  const auto may_step = [&](uint32_t rank) { return !ended[rank] && exchanges[rank]->done(); };
  const auto stalled = [&](uint32_t rank, uint64_t tick) {
    return run.stalled && run.stalled(rank, tick);
  };
  uint64_t idle = 0;
  for (uint64_t tick = 0; idle < kIdleTicks; ++tick, ++idle) {
    const auto rank = static_cast<uint32_t>(random() % exchanges.size());
    if (may_step(rank) && !stalled(rank, tick)) {
      idle = 0;
      const std::optional<LoopbackStep> step = run.next(rank);
      ended[rank] = !step.has_value();
      if (step) GW_RETURN_IF_ERROR(exchanges[rank]->start(step->bucket, step->number));
      collect(rank);
      continue;
    }
    if (in_flight.empty()) {
      bool any = false;
      for (uint32_t r = 0; r < exchanges.size(); ++r) any = any || may_step(r);
      if (any) continue;
      break;
    }
    InFlight message = draw(in_flight, random);
    const uint32_t target = message.sent.peer;
    if (stalled(target, tick)) {
      in_flight.push_back(std::move(message));
      continue;
    }
    idle = 0;
    GW_RETURN_IF_ERROR(message.deliver(exchanges));
    collect(target);
  }
  for (uint32_t rank = 0; rank < exchanges.size(); ++rank) {
    const Exchange& exchange = *exchanges[rank];
    if (!exchange.done() && !exchange.awaits_any()) return still_waits(rank, exchange);
  }
  return {};
}

}  // namespace gradwire
