// The simulated engine.

#include "engines/simulated/simulation.h"

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "errors.h"
#include "exchange.h"
#include "gil.h"
#include "module.h"

namespace gradwire::python {
namespace {

using Buckets = std::vector<std::pair<const PyLayout*, double>>;
using CostFunction = nb::typed<nb::callable, nb::typed<nb::tuple, double, double>(nb::str)>;

// Lets Python handle a signal such as that of Ctrl-C, and throws what the handler raises.
void handle_signals() {
  const GilHeld gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// A simulation with the array that it reads.
struct PySimulation {
  FloatInput values;
  std::unique_ptr<Simulation> simulation;
};

void make_simulation_in(PySimulation* self, const std::string& exchange, uint32_t ranks,
                        const Buckets& buckets, ArrayLike values, double bits_per_second,
                        double latency, uint32_t ranks_per_machine, double local_bits_per_second,
                        uint32_t turn_bytes, uint64_t burst_bytes, std::optional<CostFunction> cost,
                        double per_message, double pause, uint64_t stride, uint64_t seed) {
  FloatInput input(values);
  SimulationOptions options;
  options.exchange = exchange;
  options.ranks = ranks;
  for (const auto& [layout, ready] : buckets) {
    options.buckets.push_back({.layout = layout->layout, .ready = ready});
  }
  options.values = input.values();
  options.network.bits_per_second = bits_per_second;
  options.network.latency = latency;
  options.network.ranks_per_machine = ranks_per_machine;
  options.network.local_bits_per_second = local_bits_per_second;
  options.network.turn_bytes = turn_bytes;
  options.network.burst_bytes = burst_bytes;
  options.per_message = per_message;
  options.pause = pause;
  options.stride = stride;
  options.seed = seed;
  options.look_up = handle_signals;
  if (cost) {  // it is called in create alone, with the GIL
    options.cost = [&cost](const std::string& codec) {
      const auto [encode, decode] = nb::cast<std::pair<double, double>>((*cost)(codec));
      return CodecCost{.encode = encode, .decode = decode};
    };
  }
  auto simulation = value_or_raise(Simulation::create(std::move(options)));
  new (self) PySimulation{std::move(input), std::move(simulation)};
}

Dict take_step(PySimulation& self) {
  const SimulatedStep step = value_or_raise(without_gil([&] { return self.simulation->step(); }));
  nb::dict entry;
  entry["seconds"] = step.seconds;
  entry["codec_seconds"] = step.codec_seconds;
  entry["longest_way"] = step.longest_way;
  entry["ranks"] = dicts_of(step.traffic, [](nb::dict& rank, const RankTraffic& traffic) {
    rank["messages_sent"] = traffic.messages_sent;
    rank["bytes_sent"] = traffic.bytes_sent;
    rank["bytes_received"] = traffic.bytes_received;
    rank["local_bytes_sent"] = traffic.local_bytes_sent;
  });
  return entry;
}

}  // namespace

void bind_simulation(nb::module_& module) {
  nb::class_<PySimulation>(
      module, "Simulation",
      "The exchanges of all ranks in this process, on the clock of a simulated network.\n\n"
      "buckets: (layout, seconds after which each rank has the gradients), in the order in which "
      "they are exchanged; a layout is of all ranks, or of all machines for exchanges between "
      "machines. exchange: also 'server' and 'server:pulls=gradients', for layouts with servers, "
      "each of which has a machine of its own; with 'server' the averages are the change of the "
      "model. values: float32, repeated as gradients; rank r begins step s at "
      "(r + s * ranks) * stride, with the ranks that are no servers. latency: seconds between "
      "machines. turn_bytes: after so many bytes another connection of the link sends. "
      "burst_bytes: that each end of a link passes at once, each way, after it was idle. "
      "cost(codec) -> seconds a value of encode, decode; None: no time. per_message: seconds of "
      "CPU of the sender and of the receiver. pause: seconds between steps.")
      .def("__init__", &make_simulation_in, nb::arg("exchange"), nb::arg("ranks"),
           nb::arg("buckets"), nb::arg("values"), nb::kw_only(), nb::arg("bits_per_second"),
           nb::arg("latency") = 0.0, nb::arg("ranks_per_machine") = 1,
           nb::arg("local_bits_per_second") = std::numeric_limits<double>::infinity(),
           nb::arg("turn_bytes") = 65536, nb::arg("burst_bytes") = 0, nb::arg("cost") = nb::none(),
           nb::arg("per_message") = 0.0, nb::arg("pause") = 0.0, nb::arg("stride") = 104729,
           nb::arg("seed") = 0)
      .def("step", &take_step,
           "The next step: seconds until the last rank has the last bucket, codec_seconds (the "
           "largest sum of any rank), longest_way (messages that wait for each other) and ranks: "
           "messages_sent, bytes_sent and bytes_received between machines, local_bytes_sent.");
}

}  // namespace gradwire::python
