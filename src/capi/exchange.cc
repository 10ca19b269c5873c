// Exchanges in C.

#include "gradwire/exchange.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/return_if_error.h"
#include "capi/arguments.h"
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

// Keeps the status that the update returned.
Status call_update(gw_shard_update update, void* data, std::span<float> bucket) {
  const auto status = static_cast<uint32_t>(update(bucket.data(), bucket.size(), data));
  if (status == GW_OK) return {};
  const auto code =
      status <= UINT8_MAX ? static_cast<StatusCode>(status) : StatusCode::kInvalidArgument;
  return {code, "the update failed with status " + std::to_string(status)};
}

Result<std::unique_ptr<Exchange>> make(std::shared_ptr<const Layout> layout, uint32_t rank,
                                       const gw_exchange_options& options) {
  GW_ASSIGN_OR_RETURN(
      Execution execution,
      Execution::create(options.target == nullptr ? "auto" : options.target, options.threads));
  ExchangeOptions chosen = {.seed = options.seed};
  if (options.update != nullptr) {
    chosen.update = [call = options.update, data = options.update_data](std::span<float> bucket) {
      return call_update(call, data, bucket);
    };
  }
  return make_exchange(options.kind == nullptr ? kDefaults.kind : options.kind, std::move(layout),
                       rank, std::move(execution), std::move(chosen));
}

}  // namespace

extern "C" {

void gw_exchange_options_init(gw_exchange_options* options) { *options = kDefaults; }

gw_status gw_exchange_create(const gw_layout* layout, uint32_t rank,
                             const gw_exchange_options* options, gw_exchange** exchange) {
  return guarded({{"layout", layout}, {"exchange", exchange}}, [&]() -> Status {
    GW_ASSIGN_OR_RETURN(auto made,
                        make(layout->layout, rank, options == nullptr ? kDefaults : *options));
    std::string description = made->describe();
    *exchange = new gw_exchange{std::move(made), std::move(description)};
    return {};
  });
}

void gw_exchange_free(gw_exchange* exchange) { delete exchange; }

const char* gw_exchange_description(const gw_exchange* exchange) {
  return exchange->description.c_str();
}

gw_status gw_exchange_check_peer(const gw_exchange* exchange, uint32_t peer,
                                 const char* description) {
  return guarded({{"exchange", exchange}, {"description", description}},
                 [&]() -> Status { return exchange->exchange->check_peer(peer, description); });
}

gw_status gw_exchange_start(gw_exchange* exchange, float* bucket, uint64_t n, uint64_t step) {
  return guarded({{"exchange", exchange}, {"bucket", bucket, n}}, [&]() -> Status {
    Exchange& machine = *exchange->exchange;
    if (machine.done()) {
      // Messages of the previous step that were not taken are dropped.
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
  return guarded(
      {{"exchange", exchange}, {"messages", messages, capacity}, {"count", count}},
      [&]() -> Status {
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
  return guarded(
      {{"exchange", exchange}, {"peers", peers, capacity}, {"count", count}}, [&]() -> Status {
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

uint64_t gw_exchange_max_message_size(const gw_exchange* exchange) {
  return exchange->exchange->max_message_size();
}

gw_status gw_exchange_receive(gw_exchange* exchange, uint32_t peer, const void* message,
                              uint64_t size) {
  return guarded({{"exchange", exchange}, {"message", message, size}}, [&]() -> Status {
    return exchange->exchange->receive(peer, bytes_at(message, size));
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
  return guarded({{"exchange", exchange}}, [&]() -> Status {
    if (!exchange->retractable || !exchange->exchange->done()) {
      return {StatusCode::kUnexpectedMessage,
              "retract: there is no step that has ended, or it is retracted already"};
    }
    exchange->retractable = false;
    exchange->exchange->retract();
    return {};
  });
}

gw_status gw_exchange_scale_residuals(gw_exchange* exchange, float factor) {
  return guarded({{"exchange", exchange}}, [&]() -> Status {
    if (!std::isfinite(factor)) {
      return {StatusCode::kInvalidArgument, "the factor is not finite"};
    }
    exchange->exchange->scale_residuals(factor);
    return {};
  });
}

gw_status gw_exchange_export_residuals(const gw_exchange* exchange, gw_residuals** residuals) {
  return guarded({{"exchange", exchange}, {"residuals", residuals}}, [&]() -> Status {
    *residuals = new gw_residuals{exchange->exchange->export_residuals()};
    return {};
  });
}

void gw_residuals_free(gw_residuals* residuals) { delete residuals; }

size_t gw_residuals_count(const gw_residuals* residuals) { return residuals->pieces.size(); }

gw_status gw_residuals_at(const gw_residuals* residuals, size_t index, gw_residual_piece* piece) {
  return guarded({{"residuals", residuals}, {"piece", piece}}, [&]() -> Status {
    GW_RETURN_IF_ERROR(check_index(index, residuals->pieces.size()));
    const ResidualPiece& found = residuals->pieces[index];
    *piece = {.direction = found.direction == Direction::kPush ? GW_PUSH : GW_PULL,
              .tensor = found.tensor.c_str(),
              .offset = found.offset,
              .n = found.values.size(),
              .values = found.values.data()};
    return {};
  });
}

gw_status gw_exchange_import_residual(gw_exchange* exchange, const gw_residual_piece* piece) {
  return guarded({{"exchange", exchange}, {"piece", piece}}, [&]() -> Status {
    GW_RETURN_IF_ERROR(check_given(
        {{"the piece's tensor", piece->tensor}, {"the piece's values", piece->values, piece->n}}));
    if (piece->direction != GW_PUSH && piece->direction != GW_PULL) {
      return {StatusCode::kInvalidArgument, "a residual is of a push (1) or of a pull (2), not " +
                                                std::to_string(piece->direction)};
    }
    if (piece->n > kMaxNumel) {
      return {StatusCode::kInvalidArgument,
              "a residual of " + std::to_string(piece->n) + " values: no layout has that place"};
    }
    return exchange->exchange->import_residual(
        {.direction = piece->direction == GW_PUSH ? Direction::kPush : Direction::kPull,
         .tensor = piece->tensor,
         .offset = piece->offset,
         .values = {piece->values, piece->values + piece->n}});
  });
}

gw_status gw_exchange_get_stats(const gw_exchange* exchange, gw_exchange_stats* stats) {
  return guarded({{"exchange", exchange}, {"stats", stats}}, [&]() -> Status {
    const ExchangeStats& counted = exchange->exchange->stats();
#define GW_EXCHANGE_COUNTER(type, name, python_name) stats->name = counted.name;
#include "gradwire/exchange_counters.def"
#undef GW_EXCHANGE_COUNTER
    return {};
  });
}

}  // extern "C"
