// Exchanges in C.

#include "gradwire/exchange.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <string_view>
#include <utility>

#include "base/return_if_error.h"
#include "capi/errors.h"
#include "capi/handles.h"
#include "gradwire/exchange_choice.h"

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

Result<std::unique_ptr<Exchange>> make(std::shared_ptr<const Layout> layout, uint32_t rank,
                                       const gw_exchange_options& options) {
  Result<Execution> execution =
      Execution::create(options.target == nullptr ? "auto" : options.target, options.threads);
  if (!execution.ok()) return execution.status();
  ExchangeOptions chosen = {.seed = options.seed};
  if (options.update != nullptr) {
    chosen.update = [call = options.update, data = options.update_data](std::span<float> bucket) {
      return call_update(call, data, bucket);
    };
  }
  return make_exchange(options.kind == nullptr ? kDefaults.kind : options.kind, std::move(layout),
                       rank, std::move(execution).value(), std::move(chosen));
}

// The registry as C sees it. The texts of an ExchangeInfo are literals, which end with NUL.
class ExchangeTable {
 public:
  ExchangeTable() {
    for (const ExchangeInfo* info : exchanges()) {
      std::vector<gw_parameter_info>& parameters = parameters_.emplace_back();
      for (const CodecParameter& parameter : info->parameters) {
        parameters.push_back({.name = parameter.name.data(),
                              .default_value = parameter.default_value.data(),
                              .values = parameter.values.data(),
                              .help = parameter.help.data()});
      }
      infos_.push_back({.name = info->name.data(),
                        .summary = info->summary.data(),
                        .source = info->source.data(),
                        .sums = info->sums ? 1 : 0,
                        .updates = info->updates ? 1 : 0,
                        .parameters = parameters.data(),
                        .parameter_count = parameters.size()});
    }
  }

  [[nodiscard]] const gw_exchange_info* at(size_t i) const {
    return i < infos_.size() ? &infos_[i] : nullptr;
  }

 private:
  std::list<std::vector<gw_parameter_info>> parameters_;
  std::vector<gw_exchange_info> infos_;
};

}  // namespace

extern "C" {

size_t gw_exchange_count(void) { return exchanges().size(); }

const gw_exchange_info* gw_exchange_info_at(size_t index) {
  try {
    static const ExchangeTable kTable;
    return kTable.at(index);
  } catch (const std::bad_alloc&) {
    report_out_of_memory();
    return nullptr;
  }
}

void gw_exchange_options_init(gw_exchange_options* options) { *options = kDefaults; }

gw_status gw_exchange_create(const gw_layout* layout, uint32_t rank,
                             const gw_exchange_options* options, gw_exchange** exchange) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("layout", layout));
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    auto made = make(layout->layout, rank, options == nullptr ? kDefaults : *options);
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
#define GW_EXCHANGE_COUNTER(type, name, python_name) stats->name = counted.name;
#include "gradwire/exchange_counters.def"
#undef GW_EXCHANGE_COUNTER
    return {};
  });
}

}  // extern "C"
