// The exchange with dedicated servers.

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "exchange.h"
#include "gradwire/server.h"
#include "module.h"

namespace gradwire::python {
namespace {

// A side of the server exchange: PyExchange with the functions that Side adds. AsSide: as_server or
// as_worker.
template <typename Side, Side* (*kAsSide)(Exchange*)>
class PySide : public PyExchange {
 public:
  using PyExchange::PyExchange;

  Side& side() { return *kAsSide(&exchange()); }
};
using PyServer = PySide<ServerSide, &as_server>;
using PyWorker = PySide<WorkerSide, &as_worker>;

ServerOptions::Pulls parse_pulls(const std::string& pulls) {
  if (pulls == "updates") return ServerOptions::Pulls::kUpdates;
  if (pulls == "gradients") return ServerOptions::Pulls::kGradients;
  raise(StatusCode::kInvalidArgument,
        "pulls is '" + pulls + "'; valid are 'updates' and 'gradients'");
}

ServerOptions::Turns parse_turns(const std::string& turns) {
  if (turns == "own") return ServerOptions::Turns::kOwn;
  if (turns == "any") return ServerOptions::Turns::kAny;
  raise(StatusCode::kInvalidArgument, "turns is '" + turns + "'; valid are 'own' and 'any'");
}

// Makes the exchange of a rank; `side` says which side it must be.
template <typename Side, Side* (*kAsSide)(Exchange*)>
std::unique_ptr<Exchange> make_side(const PyLayout& layout, uint32_t rank, Execution execution,
                                    const ServerOptions& server, ExchangeOptions options,
                                    const char* side) {
  auto made = value_or_raise(
      make_exchange(server.text(), layout.layout, rank, std::move(execution), std::move(options)));
  if (kAsSide(made.get()) == nullptr) {
    raise(StatusCode::kInvalidArgument, "rank " + std::to_string(rank) + " is no " + side);
  }
  return made;
}

void make_server_in(PyServer* self, const PyLayout& layout, uint32_t rank,
                    std::optional<nb::typed<nb::callable, nb::object()>> update,
                    const std::string& pulls, uint32_t backup, const std::string& turns,
                    uint64_t staleness, uint64_t history, int threads, const std::string& target,
                    uint64_t seed) {
  std::shared_ptr<Callback> callback;
  ExchangeOptions options;
  options.seed = seed;
  if (update) {
    callback = std::make_shared<Callback>(std::move(*update));
    options.update = [callback](std::span<float>) { return (*callback)(); };
  }
  const ServerOptions server = {.pulls = parse_pulls(pulls),
                                .backup = backup,
                                .turns = parse_turns(turns),
                                .staleness = staleness,
                                .history = history,
                                .behind = ServerOptions::Behind::kReport};
  new (self) PyServer(make_side<ServerSide, &as_server>(
                          layout, rank, value_or_raise(Execution::create(target, threads)), server,
                          std::move(options), "server"),
                      callback);
}

void make_worker_in(PyWorker* self, const PyLayout& layout, uint32_t rank,
                    nb::typed<nb::callable, nb::object(uint32_t, uint64_t)> apply,
                    const std::string& pulls, uint32_t backup, const std::string& turns,
                    uint64_t staleness, uint64_t history, int threads, const std::string& target,
                    uint64_t seed) {
  const auto callback = std::make_shared<Callback>(std::move(apply));
  ExchangeOptions options;
  options.seed = seed;
  options.apply = [callback](uint32_t server, uint64_t version, std::span<const float>) {
    return (*callback)(server, version);
  };
  const ServerOptions server = {.pulls = parse_pulls(pulls),
                                .backup = backup,
                                .turns = parse_turns(turns),
                                .staleness = staleness,
                                .history = history};
  new (self) PyWorker(make_side<WorkerSide, &as_worker>(
                          layout, rank, value_or_raise(Execution::create(target, threads)), server,
                          std::move(options), "worker"),
                      callback);
}

// Binds one of the two classes with the functions that both have. callback: the name of that
// argument of `make`.
template <typename Side, typename Make>
nb::class_<Side, PyExchange> bind_side(nb::module_& module, const char* name, const char* doc,
                                       const Make& make, const char* callback,
                                       const char* dropped_doc) {
  return nb::class_<Side, PyExchange>(module, name, nb::type_slots(exchange_slots), doc)
      .def("__init__", make, nb::arg("layout"), nb::arg("rank"), nb::arg(callback), nb::kw_only(),
           nb::arg("pulls") = "updates", nb::arg("backup") = 0, nb::arg("turns") = "own",
           nb::arg("staleness") = 0, nb::arg("history") = 64, nb::arg("threads") = 1,
           nb::arg("target") = "auto", nb::arg("seed") = 0)
      .def_prop_ro(
          "dropped_pushes", [](Side& self) { return self.side().dropped_pushes(); }, dropped_doc);
}

}  // namespace

void bind_server_sides(nb::module_& module) {
  bind_side<PyServer>(
      module, "ServerSide",
      "A server of the exchange with dedicated servers; the layout has `servers`.\n\n"
      "update: called without arguments when the bucket holds the averages of this server's "
      "tensors, to turn them in place into the model's change; None with pulls='gradients', where "
      "the averages are pulled.",
      &make_server_in, "update", "The number of each worker's pushes that came too late.")
      .def_prop_ro(
          "version", [](PyServer& self) { return self.side().version(); },
          "Number of finished versions of this server's tensors.")
      .def(
          "set_version",
          [](PyServer& self, uint64_t version) {
            raise_if_error(self.side().set_version(version));
          },
          nb::arg("version"), "Sets a resumed run's version, at its start.")
      .def_prop_ro(
          "behind", [](PyServer& self) { return self.side().behind(); },
          "Workers that lack versions which are no longer kept; they need the model.")
      .def(
          "caught_up",
          [](PyServer& self, uint32_t worker) { raise_if_error(self.side().caught_up(worker)); },
          nb::arg("worker"), "Notes that the worker is sent the model of this version.")
      .def(
          "lose", [](PyServer& self, uint32_t worker) { raise_if_error(self.side().lose(worker)); },
          nb::arg("worker"),
          "Goes on without the worker. Its push of the version under way counts if it has "
          "arrived; nothing of it may be received any more.")
      .def_prop_ro(
          "pushed", [](PyServer& self) { return self.side().pushed(); },
          "Workers whose push of the version under way has come.")
      .def(
          "join",
          [](PyServer& self, uint32_t worker, uint64_t first) {
            raise_if_error(self.side().join(worker, first));
          },
          nb::arg("worker"), nb::arg("first"),
          "Between two versions: another process takes the place of a lost worker. Versions from "
          "`first` on wait for its pushes. Until the first has come, `first` may be raised.");

  bind_side<PyWorker>(
      module, "WorkerSide",
      "A worker of the exchange with dedicated servers; the layout has `servers`.\n\n"
      "apply: called with (server, version) when the bucket holds a change of that server's "
      "tensors (with pulls='gradients': the average of their gradients), to apply it.",
      &make_worker_in, "apply",
      "By the server's rank: the number of pushes that this worker held back, because that server "
      "was ahead of another.")
      .def_prop_ro(
          "servers", [](PyWorker& self) { return self.side().listening(); },
          "Ranks of the servers with which it exchanges.")
      .def(
          "version", [](PyWorker& self, uint32_t server) { return self.side().version(server); },
          nb::arg("server"), "Number of versions of the server's tensors applied here.")
      .def_prop_ro(
          "next_version", [](PyWorker& self) { return self.side().next_version(); },
          "The version for which the next start pushes.")
      .def_prop_ro(
          "has_turn", [](PyWorker& self) { return self.side().has_turn(); },
          "With turns='any': whether the next start pushes for a version once more. `done` is true "
          "then, although the version is still to come.")
      .def(
          "hold_back", [](PyWorker& self) { raise_if_error(self.side().hold_back()); },
          "Leaves out the push of this step, because another part of the model is at an older "
          "version, and asks for the versions that this worker lacks.")
      .def(
          "set_version",
          [](PyWorker& self, uint32_t server, uint64_t version) {
            raise_if_error(self.side().set_version(server, version));
          },
          nb::arg("server"), nb::arg("version"), "Sets a resumed run's version, at its start.")
      .def(
          "catch_up",
          [](PyWorker& self, uint32_t server, uint64_t version) {
            raise_if_error(self.side().catch_up(server, version));
          },
          nb::arg("server"), nb::arg("version"),
          "Notes that this worker now has the server's tensors of this version.")
      .def(
          "join",
          [](PyWorker& self, uint32_t server, uint64_t first, ArrayLike bucket) {
            raise_if_error(self.side().join(server, first, self.lend(bucket)));
          },
          nb::arg("server"), nb::arg("first"), nb::arg("bucket"),
          "After set_version: pulls the versions before `first` into the bucket, unpushed.");
}

}  // namespace gradwire::python
