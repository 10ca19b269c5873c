// The exchanges that the PyTorch engine drives.

#include "gradwire/exchange.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "exchange.h"
#include "exchange/steps/exchange_entry.h"
#include "gradwire/exchange_choice.h"
#include "gradwire/exchange_cost.h"
#include "module.h"

namespace gradwire::python {
namespace {

// Null where the object's constructor has not come to an end, or there is no callback.
Callback* callback_of(PyObject* self) {
  return nb::inst_ready(self) ? nb::inst_ptr<PyExchange>(self)->callback() : nullptr;
}

int traverse_exchange(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<PyExchange>(self)->events().ptr());
  Callback* callback = callback_of(self);
  return callback == nullptr ? 0 : callback->traverse(visit, arg);
}

int clear_exchange(PyObject* self) {
  if (Callback* callback = callback_of(self)) callback->clear();
  if (nb::inst_ready(self)) nb::inst_ptr<PyExchange>(self)->drop_events();
  return 0;
}

ShardCodecFactory shard_codecs_of(const std::optional<ShardCodecs>& shard_codecs, int threads,
                                  const std::string& target) {
  return shard_codecs ? shard_codecs->make
                      : host_shard_codecs(value_or_raise(Execution::create(target, threads)));
}

PyExchange::Place place_of(const std::optional<ShardCodecs>& shard_codecs) {
  return shard_codecs ? PyExchange::Place::kDevice : PyExchange::Place::kHost;
}

// Makes an exchange that is only a leg of the sharded one.
template <Result<std::unique_ptr<Exchange>> (*kMake)(ExchangeSetup)>
PyExchange* make_leg(const PyLayout& layout, uint32_t rank, int threads, const std::string& target,
                     uint64_t seed, const std::optional<ShardCodecs>& shard_codecs) {
  ExchangeSetup setup = {.layout = layout.layout,
                         .rank = rank,
                         .codecs = shard_codecs_of(shard_codecs, threads, target),
                         .options = {}};
  setup.options.seed = seed;
  return new PyExchange(value_or_raise(kMake(std::move(setup))), nullptr, place_of(shard_codecs));
}

using UpdateFunction = nb::typed<nb::callable, nb::object()>;

void make_exchange_in(PyExchange* self, const PyLayout& layout, uint32_t rank,
                      const std::string& kind, std::optional<UpdateFunction> update,
                      std::optional<std::vector<uint32_t>> machine_of_rank, int threads,
                      const std::string& target, uint64_t seed,
                      const std::optional<ShardCodecs>& shard_codecs) {
  ExchangeSetup setup = {.layout = layout.layout,
                         .rank = rank,
                         .codecs = shard_codecs_of(shard_codecs, threads, target),
                         .options = {}};
  setup.options.seed = seed;
  if (machine_of_rank) setup.options.machine_of_rank = std::move(*machine_of_rank);
  std::shared_ptr<Callback> callback;
  if (update) {
    callback = std::make_shared<Callback>(std::move(*update));
    setup.options.update = [callback](std::span<float>) { return (*callback)(); };
  }
  new (self) PyExchange(value_or_raise(make_exchange(kind, std::move(setup))), callback,
                        place_of(shard_codecs));
}

DictList leg_dicts(std::span<const ExchangeLeg> legs) {
  return dicts_of(legs, [](nb::dict& entry, const ExchangeLeg& leg) {
    entry["route"] = route_name(leg.route);
    entry["direction"] = direction_name(leg.direction);
  });
}

DictList list_exchanges() {
  return dicts_of(exchanges(), [](nb::dict& entry, const ExchangeInfo* info) {
    entry["name"] = info->name;
    entry["summary"] = info->summary;
    entry["source"] = info->source;
    entry["default_codec"] = info->default_codec;
    entry["sums"] = info->sums;
    entry["updates"] = info->updates;
    entry["has_owners"] = info->has_owners;
    entry["encodes_sums_on_the_way"] = info->encodes_sums_on_the_way;
    entry["adds_trits"] = info->adds_trits;
    entry["always_skips_non_finite"] = info->always_skips_non_finite;
    entry["between_machines"] = info->between_machines;
    entry["has_servers"] = info->has_servers;
    entry["chooses_codecs"] = info->chooses_codecs;
    entry["has_single_legs"] = info->has_single_legs;
    entry["legs"] = leg_dicts(info->legs);
    entry["scale_legs"] = leg_dicts(info->scale_legs);
    entry["parameters"] = parameter_dicts({info->parameters});
  });
}

Dict parse_exchange(const std::string& text) {
  const ExchangeChoice choice = value_or_raise(ExchangeChoice::parse(text));
  nb::dict parsed;
  parsed["text"] = choice.text();
  parsed["name"] = choice.info().name;
  parsed["inner"] = choice.inner().name;
  parsed["ranks_per_machine"] = choice.ranks_per_machine();
  parsed["within"] = choice.within() == nullptr ? "" : choice.within()->name;
  parsed["within_codec"] = choice.within_codec();
  parsed["uncompressed"] = choice.uncompressed().text();
  return parsed;
}

Dict exchange_cost(const std::string& text, uint32_t rank, uint32_t ranks, double values,
                   double push_bytes, double pull_bytes, uint32_t servers,
                   std::optional<double> scale_bytes, std::optional<std::vector<double>> shares) {
  const ExchangeCost cost =
      value_or_raise(cost_of(value_or_raise(ExchangeChoice::parse(text)),
                             {.ranks = ranks,
                              .servers = servers,
                              .values = values,
                              .push_bytes = push_bytes,
                              .pull_bytes = pull_bytes,
                              .scale_bytes = scale_bytes,
                              .shares = shares.value_or(std::vector<double>())},
                             rank));
  nb::dict entry;
  entry["messages"] = cost.messages;
  entry["messages_sent"] = cost.messages_sent;
  entry["messages_received"] = cost.messages_received;
  entry["bytes_sent"] = cost.bytes_sent;
  entry["bytes_received"] = cost.bytes_received;
  entry["values_encoded"] = cost.values_encoded;
  entry["values_decoded"] = cost.values_decoded;
  return entry;
}

using NumpyBytes = NumpyArray<const uint8_t>;

NumpyBytes bytes_of(const OutgoingMessage& message, nb::handle exchange) {
  nb::object owner = nb::borrow(exchange);
  if (message.keep) {
    owner = nb::capsule(new std::shared_ptr<const void>(message.keep), [](void* kept) noexcept {
      delete static_cast<std::shared_ptr<const void>*>(kept);
    });
  }
  return {reinterpret_cast<const uint8_t*>(message.bytes.data()), {message.bytes.size()}, owner};
}

std::vector<std::pair<uint32_t, NumpyBytes>> take_outgoing(nb::handle_t<PyExchange> self) {
  std::vector<std::pair<uint32_t, NumpyBytes>> messages;
  for (const OutgoingMessage& message : nb::cast<PyExchange&>(self).exchange().take_outgoing()) {
    messages.emplace_back(message.peer, bytes_of(message, self));
  }
  return messages;
}

std::optional<Dict> non_finite(PyExchange& self) {
  const std::optional<NonFiniteInput>& input = self.exchange().non_finite();
  if (!input) return std::nullopt;
  nb::dict entry;
  entry["rank"] = input->rank;
  entry["tensor"] = input->tensor;
  entry["element"] = input->element;
  entry["text"] = describe(*input, "the gradient");
  return entry;
}

DictList outgrown_residuals(PyExchange& self) {
  return dicts_of(self.exchange().outgrown_residuals(),
                  [](nb::dict& entry, const OutgrownResidual& found) {
                    entry["kind"] = direction_name(found.direction);
                    entry["name"] = found.tensor;
                    entry["step"] = found.step;
                    entry["factor"] = found.factor;
                    entry["limit"] = most_inputs(found.type);
                    entry["in_bf16"] = found.type == ResidualType::kBfloat16;
                  });
}

// (values pushed, payload bytes pushed, values pulled, payload bytes pulled) of each tensor.
// Engines ask for it in every step, so it has no names.
using Traffic = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;

std::vector<Traffic> tensor_traffic(PyExchange& self) {
  std::vector<Traffic> listed;
  for (const TensorTraffic& of : self.exchange().tensor_traffic()) {
    listed.emplace_back(of.values_pushed, of.push_payload_bytes, of.values_pulled,
                        of.pull_payload_bytes);
  }
  return listed;
}

DictList export_residuals(PyExchange& self) {
  const auto describe = [](nb::dict& entry, const ResidualPiece& piece) {
    entry["kind"] = direction_name(piece.direction);
    entry["name"] = piece.tensor;
    entry["offset"] = piece.offset;
    entry["values"] = nb::cast(to_numpy(piece.values));
  };
  return dicts_of(self.exchange().export_residuals(), describe);
}

void import_residual(PyExchange& self, const std::string& kind, const std::string& name,
                     uint64_t offset, ArrayLike values) {
  const FloatInput input(values);
  raise_if_error(
      self.exchange().import_residual({.direction = parse_one_direction(kind, "a residual"),
                                       .tensor = name,
                                       .offset = offset,
                                       .values = {input.values().begin(), input.values().end()}}));
}

Dict stats(PyExchange& self) {
  const ExchangeStats& stats = self.exchange().stats();
  nb::dict entry;
#define GW_EXCHANGE_COUNTER(type, name, python_name) entry[python_name] = stats.name;
#include "gradwire/exchange_counters.def"
#undef GW_EXCHANGE_COUNTER
  entry["received_bytes"] = stats.push_bytes_received + stats.pull_bytes_received;
  return entry;
}

}  // namespace

void PyExchange::set_events(nb::object events) {
  events_ = std::move(events);
  if (events_.is_none()) {
    exchange_->set_events({});
    return;
  }
  const bool overlaps = exchange_->set_events(
      {.arrive =
           [this](uint64_t end) {
             const GilHeld held;
             return nb::cast<uint64_t>(events_.attr("arrive")(end));
           },
       .send =
           [this](const OutgoingMessage& message) {
             const GilHeld held;
             events_.attr("send")(message.peer, bytes_of(message, nb::find(this)));
           },
       .finished =
           [this](uint64_t begin, uint64_t n) {
             const GilHeld held;
             events_.attr("finished")(begin, n);
           }});
  if (!overlaps) events_.attr("arrive")(bucket_.values().size());
}

PyType_Slot exchange_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse_exchange)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear_exchange)},
    {0, nullptr},
};

void bind_exchange(nb::module_& module) {
  nb::class_<ShardCodecs>(module, "ShardCodecs",
                          "Encodes and decodes the shards of buckets on a device, as "
                          "gradwire._cuda.shard_codecs makes them.");

  nb::class_<PyExchange>(
      module, "Exchange", nb::type_slots(exchange_slots),
      "An algorithm that averages a bucket over all ranks, without input or output: start, then "
      "send what outgoing() gives and receive from awaiting() until done.\n\n"
      "kind: one of exchanges() with its parameters. update (of exchanges with updates): called by "
      "the owner of a shard when the bucket holds the shard's averages, to turn them in place into "
      "the values that every rank gets. machine_of_rank (of exchanges between machines, instead of "
      "the parameter ranks): the machine of every rank; the layout's world size is the number of "
      "machines. shard_codecs: for buckets on a device; then threads and target are not used.")
      .def("__init__", &make_exchange_in, nb::arg("layout"), nb::arg("rank"),
           nb::arg("kind") = "sharded", nb::kw_only(), nb::arg("update") = nb::none(),
           nb::arg("machine_of_rank") = nb::none(), nb::arg("threads") = 1,
           nb::arg("target") = "auto", nb::arg("seed") = 0, nb::arg("shard_codecs") = nb::none())
      .def_static("reduce_scatter", &make_leg<make_reduce_scatter_exchange>, nb::arg("layout"),
                  nb::arg("rank"), nb::kw_only(), nb::arg("threads") = 1,
                  nb::arg("target") = "auto", nb::arg("seed") = 0,
                  nb::arg("shard_codecs") = nb::none(),
                  "The push of the sharded exchange alone: the segments that this rank owns end "
                  "with their averages, the others with unspecified values.")
      .def_static("allgather", &make_leg<make_allgather_exchange>, nb::arg("layout"),
                  nb::arg("rank"), nb::kw_only(), nb::arg("threads") = 1,
                  nb::arg("target") = "auto", nb::arg("seed") = 0,
                  nb::arg("shard_codecs") = nb::none(),
                  "Its pull alone: all ranks, the owner included, end with the values that are "
                  "decoded from the owner's packet.")
      .def("describe", [](PyExchange& self) { return self.exchange().describe(); })
      .def(
          "start", &PyExchange::start, nb::arg("bucket"), nb::arg("step"),
          nb::arg("events") = nb::none(),
          "Begins a step: encodes the pushes. bucket: float32 [layout.numel], which changes until "
          "done. events: its arrive(end) waits for the bucket's first `end` values and returns how "
          "many are there; send(peer, message) takes what outgoing() would give, as soon as it is "
          "encoded; finished(begin, n) hears of values that hold the result. They raise nothing.")
      .def("start_on_device", &PyExchange::start_on_device, nb::arg("address"), nb::arg("numel"),
           nb::arg("step"),
           "The same for an exchange with shard_codecs: the address of the bucket on the device, "
           "which the caller keeps alive until done.")
      .def("outgoing", &take_outgoing,
           "[(peer, uint8 array)]: messages to send now, each handed out once, valid until the "
           "next start.")
      .def(
          "awaiting", [](PyExchange& self) { return self.exchange().awaiting(); },
          "Ranks from which a message is due now.")
      .def_prop_ro(
          "awaits_any", [](PyExchange& self) { return self.exchange().awaits_any(); },
          "Whether it may go on without some of the ranks in awaiting(): take a message of any.")
      .def_prop_ro(
          "listening", [](PyExchange& self) { return self.exchange().listening(); },
          "Ranks whose messages may be handed over at any time, also when the step is done.")
      .def_prop_ro(
          "max_message_size", [](PyExchange& self) { return self.exchange().max_message_size(); },
          "No message for this rank has more bytes, in any step.")
      .def("receive", &PyExchange::receive, nb::arg("peer"), nb::arg("message"))
      .def_prop_ro("done", [](PyExchange& self) { return self.exchange().done(); })
      .def_prop_ro("non_finite", &non_finite)
      .def_prop_ro(
          "keeps_residuals", [](PyExchange& self) { return self.exchange().keeps_residuals(); },
          "Whether any segment has a residual on any rank.")
      .def_prop_ro("outgrown_residuals", &outgrown_residuals,
                   "This rank's residuals that were found with more than `limit` times the norm of "
                   "their input: kind, name, step, factor, limit, in_bf16; each tensor once.")
      .def(
          "retract", [](PyExchange& self) { self.exchange().retract(); },
          "Puts the values that the last step sent back into the residuals, if no rank applied it.")
      .def(
          "scale_residuals",
          [](PyExchange& self, float factor) { self.exchange().scale_residuals(factor); },
          nb::arg("factor"))
      .def_prop_ro(
          "residual_bytes", [](PyExchange& self) { return self.exchange().residual_bytes(); },
          "Bytes of this rank's residuals in the memory of the host.")
      .def("keep_residuals_in", &PyExchange::keep_residuals_in, nb::arg("memory"),
           "From now on the residuals are the values in `memory`, uint8 [residual_bytes], which "
           "may be another one, or hold others, in each step.")
      .def("export_residuals", &export_residuals)
      .def("import_residual", &import_residual, nb::arg("kind"), nb::arg("name"), nb::arg("offset"),
           nb::arg("values"))
      .def("stats", &stats)
      .def("tensor_traffic", &tensor_traffic,
           "[(values pushed, payload bytes, values pulled, payload bytes)]: what this rank has "
           "encoded of each tensor of the layout so far; a pull counts once.");

  module.def("exchanges", &list_exchanges, "All exchanges with parameters and sources.");
  module.def(
      "exchange_cost", &exchange_cost, nb::arg("exchange"), nb::arg("rank"), nb::arg("ranks"),
      nb::arg("values"), nb::arg("push_bytes"), nb::arg("pull_bytes"), nb::kw_only(),
      nb::arg("servers") = 0, nb::arg("scale_bytes") = nb::none(), nb::arg("shares") = nb::none(),
      "What a rank does for one bucket: messages (on the longest way), messages_sent, "
      "messages_received, bytes_sent, bytes_received, values_encoded, values_decoded.\n\n"
      "Args:\n"
      "    exchange: one of exchanges() with its parameters. Of an exchange between machines "
      "the cost is that to the speaker of a machine, without what happens inside it.\n"
      "    rank: below ranks + servers; servers follow their workers.\n"
      "    ranks: all ranks, the workers, or the machines.\n"
      "    values: of the bucket.\n"
      "    push_bytes, pull_bytes: of all values in each direction, without headers.\n"
      "    scale_bytes: of the scales that trits share; None: no trits do.\n"
      "    shares: each owner's share of the bucket, together 1; None: all own as much.\n\n"
      "Raises:\n"
      "    GradwireError: an unknown exchange, or a rank or shares that it does not have.");
  module.def("parse_exchange", &parse_exchange, nb::arg("text"),
             "An exchange's text, parsed: text (in full), name, inner (the exchange among the "
             "speakers), ranks_per_machine (0: not given), within (the exchange inside a machine; "
             "empty: not given), within_codec, uncompressed (the text without a codec). Raises "
             "GradwireError listing the valid texts.");
}

}  // namespace gradwire::python
