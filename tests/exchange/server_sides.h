#pragma once

// The sides of the server exchange with their own types, for tests.

#include <memory>
#include <utility>

#include "gradwire/server.h"

namespace gradwire {

template <typename Side>
Result<std::unique_ptr<Side>> as_side(Result<std::unique_ptr<Exchange>> made,
                                      Side* (*as)(Exchange*)) {
  if (!made.ok()) return made.status();
  Side* const side = as(made.value().get());
  if (side == nullptr) return Status(StatusCode::kInvalidArgument, "the rank is of the other side");
  (void)std::move(made).value().release();
  return std::unique_ptr<Side>(side);
}

inline Result<std::unique_ptr<WorkerSide>> make_server_worker(std::shared_ptr<const Layout> layout,
                                                              uint32_t rank, Execution execution,
                                                              const ServerOptions& options,
                                                              ApplyDelta apply) {
  return as_side(make_exchange(options.text(), std::move(layout), rank, std::move(execution),
                               {.apply = std::move(apply)}),
                 &as_worker);
}

inline Result<std::unique_ptr<ServerSide>> make_server(std::shared_ptr<const Layout> layout,
                                                       uint32_t rank, Execution execution,
                                                       const ServerOptions& options,
                                                       ShardUpdate update) {
  return as_side(make_exchange(options.text(), std::move(layout), rank, std::move(execution),
                               {.update = std::move(update)}),
                 &as_server);
}

}  // namespace gradwire
