// Exchanges in C.

#include "gradwire/exchange.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "base/return_if_error.h"
#include "capi/errors.h"
#include "capi/handles.h"

using namespace gradwire;
using namespace gradwire::capi;

namespace {

constexpr gw_exchange_options kDefaults = {.kind = "sharded",
                                           .target = nullptr,
                                           .threads = 1,
                                           .seed = 0,
                                           .update = nullptr,
                                           .update_data = nullptr};

// What the update returned stays its code, whatever it is.
Status call_update(gw_shard_update update, void* data, std::span<float> bucket) {
  const auto status = static_cast<uint32_t>(update(bucket.data(), bucket.size(), data));
  if (status == GW_OK) return {};
  const auto code =
      status <= UINT8_MAX ? static_cast<StatusCode>(status) : StatusCode::kInvalidArgument;
  return {code, "the update failed with status " + std::to_string(status)};
}

Result<std::unique_ptr<Exchange>> make_exchange(std::shared_ptr<const Layout> layout, uint32_t rank,
                                                const gw_exchange_options& options) {
  Result<ExchangeKind> kind =
      parse_exchange(options.kind == nullptr ? kDefaults.kind : options.kind);
  if (!kind.ok()) return kind.status();
  Result<Execution> execution =
      Execution::create(options.target == nullptr ? "auto" : options.target, options.threads);
  if (!execution.ok()) return execution.status();
  if (options.update == nullptr) {
    return gradwire::make_exchange(kind.value(), std::move(layout), rank,
                                   std::move(execution).value(), options.seed);
  }
  if (kind.value() != ExchangeKind::kSharded) {
    return Status(StatusCode::kInvalidArgument, "only a sharded exchange takes an update");
  }
  return make_sharded_exchange(
      std::move(layout), rank, std::move(execution).value(), options.seed,
      [call = options.update, data = options.update_data](std::span<float> bucket) {
        return call_update(call, data, bucket);
      });
}

}  // namespace

extern "C" {

void gw_exchange_options_init(gw_exchange_options* options) { *options = kDefaults; }

gw_status gw_exchange_create(const gw_layout* layout, uint32_t rank,
                             const gw_exchange_options* options, gw_exchange** exchange) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("layout", layout));
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    auto made = make_exchange(layout->layout, rank, options == nullptr ? kDefaults : *options);
    if (!made.ok()) return made.status();
    auto handle = std::make_unique<gw_exchange>();
    handle->description = made.value()->describe();
    handle->exchange = std::move(made).value();
    *exchange = handle.release();
    return {};
  });
}

void gw_exchange_free(gw_exchange* exchange) { delete exchange; }

const char* gw_exchange_description(const gw_exchange* exchange) {
  return exchange->description.c_str();
}

gw_status gw_exchange_check_peer(const gw_exchange* exchange, uint32_t peer,
                                 const char* description) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    GW_RETURN_IF_ERROR(check_given("description", description));
    return exchange->exchange->check_peer(peer, description);
  });
}

gw_status gw_exchange_start(gw_exchange* exchange, float* bucket, uint64_t n, uint64_t step) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    GW_RETURN_IF_ERROR(check_values("bucket", bucket, n));
    Exchange& machine = *exchange->exchange;
    if (machine.done()) {
      // Whatever was not taken of the step before is gone with it.
      exchange->outgoing.clear();
      exchange->handed_out = 0;
      exchange->retractable = false;
    }
    GW_RETURN_IF_ERROR(machine.start(std::span(bucket, n), step));
    exchange->retractable = true;
    return {};
  });
}

gw_status gw_exchange_take_outgoing(gw_exchange* exchange, gw_message* messages, size_t capacity,
                                    size_t* count) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    GW_RETURN_IF_ERROR(check_values("messages", messages, capacity));
    GW_RETURN_IF_ERROR(check_given("count", count));
    if (exchange->handed_out == exchange->outgoing.size()) {
      exchange->outgoing = exchange->exchange->take_outgoing();
      exchange->handed_out = 0;
    }
    const size_t taken = std::min(capacity, exchange->outgoing.size() - exchange->handed_out);
    for (size_t i = 0; i < taken; ++i) {
      const OutgoingMessage& message = exchange->outgoing[exchange->handed_out++];
      messages[i] = {
          .peer = message.peer, .bytes = message.bytes.data(), .size = message.bytes.size()};
    }
    *count = taken;
    return {};
  });
}

gw_status gw_exchange_awaiting(const gw_exchange* exchange, uint32_t* peers, size_t capacity,
                               size_t* count) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    GW_RETURN_IF_ERROR(check_values("peers", peers, capacity));
    GW_RETURN_IF_ERROR(check_given("count", count));
    const std::vector<uint32_t> awaiting = exchange->exchange->awaiting();
    *count = awaiting.size();
    if (awaiting.size() > capacity) {
      return {StatusCode::kBufferTooSmall, std::to_string(awaiting.size()) +
                                               " ranks are awaited, there is room for " +
                                               std::to_string(capacity)};
    }
    std::ranges::copy(awaiting, peers);
    return {};
  });
}

gw_status gw_exchange_receive(gw_exchange* exchange, uint32_t peer, const void* message,
                              uint64_t size) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    GW_RETURN_IF_ERROR(check_values("message", message, size));
    return exchange->exchange->receive(peer,
                                       std::span(static_cast<const std::byte*>(message), size));
  });
}

int gw_exchange_done(const gw_exchange* exchange) { return exchange->exchange->done() ? 1 : 0; }

int gw_exchange_non_finite(const gw_exchange* exchange, gw_non_finite* where) {
  const std::optional<NonFiniteInput>& found = exchange->exchange->non_finite();
  if (!found) return 0;
  if (where != nullptr) {
    *where = {.rank = found->rank, .tensor = found->tensor.c_str(), .element = found->element};
  }
  return 1;
}

gw_status gw_exchange_retract(gw_exchange* exchange) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    if (!exchange->retractable || !exchange->exchange->done()) {
      return {StatusCode::kUnexpectedMessage,
              "retract: there is no step that has ended, or it is "
              "retracted already"};
    }
    exchange->retractable = false;
    exchange->exchange->retract();
    return {};
  });
}

gw_status gw_exchange_scale_residuals(gw_exchange* exchange, float factor) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    if (!std::isfinite(factor)) {
      return {StatusCode::kInvalidArgument, "the factor is not finite"};
    }
    exchange->exchange->scale_residuals(factor);
    return {};
  });
}

gw_status gw_exchange_get_stats(const gw_exchange* exchange, gw_exchange_stats* stats) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    GW_RETURN_IF_ERROR(check_given("stats", stats));
    const ExchangeStats& counted = exchange->exchange->stats();
    *stats = {.steps = counted.steps,
              .non_finite_steps = counted.non_finite_steps,
              .push_bytes_sent = counted.push_bytes_sent,
              .push_bytes_received = counted.push_bytes_received,
              .scale_bytes_sent = counted.scale_bytes_sent,
              .pull_bytes_sent = counted.pull_bytes_sent,
              .pull_bytes_received = counted.pull_bytes_received,
              .pull_bytes_encoded = counted.pull_bytes_encoded,
              .local_bytes_sent = counted.local_bytes_sent,
              .values_pushed = counted.values_pushed,
              .values_pulled = counted.values_pulled,
              .encode_seconds = counted.encode_seconds,
              .decode_seconds = counted.decode_seconds,
              .error_norm_sum = counted.error_norm_sum,
              .error_norm_samples = counted.error_norm_samples};
    return {};
  });
}

}  // extern "C"
