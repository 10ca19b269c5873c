#include "engines/loopback/loopback.h"

#include <algorithm>
#include <cstddef>
#include <random>
#include <string>
#include <utility>

#include "base/return_if_error.h"

namespace gradwire {
namespace {

struct InFlight {
  uint32_t source;
  uint32_t target;
  std::vector<std::byte> bytes;
};

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
      for (int i = 0; i < copies; ++i) {
        in_flight.push_back({source, message.peer, {message.bytes.begin(), message.bytes.end()}});
      }
    }
  };
  for (uint32_t rank = 0; rank < exchanges.size(); ++rank) {
    GW_RETURN_IF_ERROR(exchanges[rank]->start(buckets[rank], step));
    collect(rank);
  }
  while (!in_flight.empty()) {
    std::swap(in_flight[random() % in_flight.size()], in_flight.back());
    const InFlight message = std::move(in_flight.back());
    in_flight.pop_back();
    GW_RETURN_IF_ERROR(exchanges[message.target]->receive(message.source, message.bytes));
    collect(message.target);
  }
  for (uint32_t rank = 0; rank < exchanges.size(); ++rank) {
    if (exchanges[rank]->done()) continue;
    return {StatusCode::kTruncated, "rank " + std::to_string(rank) + " still waits for rank " +
                                        std::to_string(exchanges[rank]->awaiting().front())};
  }
  return {};
}

}  // namespace gradwire
