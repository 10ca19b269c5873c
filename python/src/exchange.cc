// Layout and Exchange: what the PyTorch engine drives.

#include "gradwire/exchange.h"

#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "errors.h"
#include "exchange/packet_exchange.h"
#include "gradwire/layout.h"
#include "gradwire/server.h"
#include "module.h"

namespace gradwire::python {
namespace {

namespace nb = nanobind;

RuleScope parse_scope(const std::string& text) {
  if (text == "both") return RuleScope::kBoth;
  if (text == "push") return RuleScope::kPush;
  if (text == "pull") return RuleScope::kPull;
  raise(Status(StatusCode::kInvalidArgument,
               "'" + text + "' is no role; valid ones are: push, pull, both"));
}

const char* role_text(RuleScope role) { return role == RuleScope::kPush ? "push" : "pull"; }

std::vector<LayoutRule> parse_rules(nb::sequence rules) {
  std::vector<LayoutRule> parsed;
  for (nb::handle entry : rules) {
    const nb::tuple rule(entry);
    if (rule.size() < 2 || rule.size() > 3) {
      raise(Status(StatusCode::kInvalidArgument,
                   "a rule is (name pattern, codec) or (name pattern, codec, role)"));
    }
    parsed.push_back({.pattern = nb::cast<std::string>(rule[0]),
                      .codec = nb::cast<std::string>(rule[1]),
                      .scope = rule.size() == 3 ? parse_scope(nb::cast<std::string>(rule[2]))
                                                : RuleScope::kBoth});
  }
  return parsed;
}

std::vector<std::string> parse_strings(nb::sequence strings) {
  std::vector<std::string> parsed;
  for (nb::handle entry : strings) parsed.push_back(nb::cast<std::string>(entry));
  return parsed;
}

class PyLayout {
 public:
  PyLayout(nb::sequence tensors, uint32_t world_size, std::string codec,
           std::optional<std::string> pull_codec, nb::sequence rules, nb::sequence exclude,
           uint64_t min_numel, std::string raw_codec, uint32_t servers) {
    std::vector<TensorInfo> infos;
    for (nb::handle entry : tensors) {
      const nb::tuple tensor(entry);
      if (tensor.size() != 2) {
        raise(Status(StatusCode::kInvalidArgument, "a tensor is (name, dims)"));
      }
      TensorInfo info{.name = nb::cast<std::string>(tensor[0]), .dims = {}};
      for (nb::handle dim : nb::sequence(tensor[1])) info.dims.push_back(nb::cast<uint64_t>(dim));
      infos.push_back(std::move(info));
    }
    const LayoutOptions options = {.codec = std::move(codec),
                                   .pull_codec = pull_codec.value_or(""),
                                   .rules = parse_rules(rules),
                                   .exclude = parse_strings(exclude),
                                   .min_numel = min_numel,
                                   .raw_codec = std::move(raw_codec),
                                   .servers = servers};
    layout_ = std::make_shared<const Layout>(
        value_or_raise(Layout::create(std::move(infos), world_size, options)));
  }

  [[nodiscard]] const std::shared_ptr<const Layout>& layout() const { return layout_; }

  [[nodiscard]] nb::list segments() const {
    nb::list list;
    for (const Segment& segment : layout_->segments()) {
      nb::dict entry;
      entry["name"] = layout_->tensors()[segment.tensor].name;
      entry["bucket_offset"] = segment.bucket_offset;
      entry["tensor_offset"] = segment.tensor_offset;
      entry["numel"] = segment.n;
      entry["owner"] = segment.owner;
      entry["push_codec"] = segment.push_codec->text();
      entry["pull_codec"] = segment.pull_codec->text();
      entry["reason"] = segment.raw_reason;
      list.append(entry);
    }
    return list;
  }

  [[nodiscard]] std::vector<uint64_t> streams(uint32_t rank) const {
    std::vector<uint64_t> streams;
    for (const Segment& segment : layout_->segments()) {
      streams.push_back(draw_stream(*layout_, rank, segment));
    }
    return streams;
  }

  [[nodiscard]] std::vector<std::string> unmatched() const { return layout_->unmatched(); }

 private:
  std::shared_ptr<const Layout> layout_;
};

class PyExchange {
 public:
  PyExchange(const PyLayout& layout, uint32_t rank, const std::string& kind,
             std::optional<nb::callable> update,
             const std::optional<std::vector<uint32_t>>& machine_of_rank,
             const std::optional<std::string>& between, int threads, const std::string& target,
             uint64_t seed)
      : call_(std::move(update)) {
    const auto execution = [&] { return value_or_raise(Execution::create(target, threads)); };
    if (call_ && kind != "sharded") {
      raise(Status(StatusCode::kInvalidArgument, "only a sharded exchange takes an update"));
    }
    if (kind == "hierarchical") {
      if (!machine_of_rank) {
        raise(
            Status(StatusCode::kInvalidArgument, "a hierarchical exchange needs machine_of_rank"));
      }
      exchange_ = value_or_raise(
          make_hierarchical_exchange(layout.layout(), rank, *machine_of_rank,
                                     value_or_raise(parse_exchange(between.value_or("sharded"))),
                                     execution(), execution(), seed));
      return;
    }
    if (machine_of_rank || between) {
      raise(Status(StatusCode::kInvalidArgument,
                   "only a hierarchical exchange takes machine_of_rank and between"));
    }
    if (call_) {
      exchange_ =
          value_or_raise(make_sharded_exchange(layout.layout(), rank, execution(), seed,
                                               [this](std::span<float>) { return call_back(); }));
      return;
    }
    Result<ExchangeKind> parsed = parse_exchange(kind);
    if (!parsed.ok()) {
      raise(Status(parsed.status().code(), parsed.status().message() + ", hierarchical"));
    }
    exchange_ =
        value_or_raise(make_exchange(parsed.value(), layout.layout(), rank, execution(), seed));
  }

  // A side of the server exchange: `call` is a server's update, without arguments, or what a worker
  // does with a version that is in the bucket, (server, version).
  PyExchange(const PyLayout& layout, uint32_t rank, nb::callable call, const ServerOptions& options,
             int threads, const std::string& target, uint64_t seed)
      : call_(std::move(call)) {
    Execution execution = value_or_raise(Execution::create(target, threads));
    std::unique_ptr<ServerExchange> made =
        rank < layout.layout()->workers()
            ? value_or_raise(make_server_worker(
                  layout.layout(), rank, std::move(execution), options,
                  [this](uint32_t server, uint64_t version, std::span<const float>) {
                    return call_back(server, version);
                  },
                  seed))
            : value_or_raise(make_server(
                  layout.layout(), rank, std::move(execution), options,
                  [this](std::span<float>) { return call_back(); }, seed));
    server_exchange_ = made.get();
    exchange_ = std::move(made);
  }

  ServerExchange& server_exchange() { return *server_exchange_; }

  Exchange& exchange() { return *exchange_; }

  void start(nb::handle bucket, uint64_t step) {
    FloatOutput values(bucket);
    if (!exchange_->done()) {
      raise(Status(StatusCode::kUnexpectedMessage, "start: the step before has not ended"));
    }
    bucket_ = values;
    run([&] { return exchange_->start(bucket_.values(), step); });
  }

  void receive(uint32_t peer, nb::handle message) {
    const ByteInput input(message);
    run([&] { return exchange_->receive(peer, input.bytes()); });
  }

 private:
  // Without the GIL. What the update raised is raised again.
  template <typename Call>
  void run(const Call& call) {
    Status status;
    {
      const nb::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      status = call();
    }
    if (raised_) std::rethrow_exception(std::exchange(raised_, nullptr));
    raise_if_error(status);
  }

  // No exception may pass through the exchange: it is kept until that has returned.
  template <typename... Arguments>
  Status call_back(Arguments... arguments) {
    const nb::gil_scoped_acquire acquire;
    try {
      (*call_)(arguments...);
      return {};
    } catch (...) {
      raised_ = std::current_exception();
      return {StatusCode::kInvalidArgument, "the exchange's callback raised an exception"};
    }
  }

  std::optional<nb::callable> call_;
  std::exception_ptr raised_;
  std::unique_ptr<Exchange> exchange_;
  ServerExchange* server_exchange_ = nullptr;  // the same, where it is one
  FloatOutput bucket_;                         // kept alive while the exchange works in it
  std::mutex mutex_;                           // without the GIL two threads could be in here
};

class PyServerExchange : public PyExchange {
 public:
  using PyExchange::PyExchange;
};

nb::list take_outgoing(nb::handle self) {
  nb::list list;
  for (const OutgoingMessage& message : nb::cast<PyExchange&>(self).exchange().take_outgoing()) {
    nb::object owner = nb::borrow(self);
    if (message.keep) {
      owner = nb::capsule(new std::shared_ptr<const void>(message.keep), [](void* kept) noexcept {
        delete static_cast<std::shared_ptr<const void>*>(kept);
      });
    }
    const NumpyBytes bytes(reinterpret_cast<const uint8_t*>(message.bytes.data()),
                           {message.bytes.size()}, owner);
    list.append(nb::make_tuple(message.peer, nb::cast(bytes)));
  }
  return list;
}

nb::object non_finite(PyExchange& self) {
  const std::optional<NonFiniteInput>& input = self.exchange().non_finite();
  if (!input) return nb::none();
  nb::dict entry;
  entry["rank"] = input->rank;
  entry["tensor"] = input->tensor;
  entry["element"] = input->element;
  return entry;
}

nb::list export_residuals(PyExchange& self) {
  nb::list list;
  for (const ResidualPiece& piece : self.exchange().export_residuals()) {
    nb::dict entry;
    entry["kind"] = role_text(piece.role);
    entry["name"] = piece.tensor;
    entry["offset"] = piece.offset;
    entry["values"] = nb::cast(to_numpy(piece.values));
    list.append(entry);
  }
  return list;
}

void import_residual(PyExchange& self, const std::string& kind, const std::string& name,
                     uint64_t offset, nb::handle values) {
  const FloatInput input(values);
  if (kind == "both") {
    raise(
        Status(StatusCode::kInvalidArgument, "a residual is of a push or of a pull, not of both"));
  }
  raise_if_error(
      self.exchange().import_residual({.role = parse_scope(kind),
                                       .tensor = name,
                                       .offset = offset,
                                       .values = {input.values().begin(), input.values().end()}}));
}

nb::dict stats(PyExchange& self) {
  const ExchangeStats& stats = self.exchange().stats();
  nb::dict entry;
  entry["steps"] = stats.steps;
  entry["non_finite_steps"] = stats.non_finite_steps;
  entry["push_bytes"] = stats.push_bytes_sent;
  entry["scale_bytes"] = stats.scale_bytes_sent;
  entry["pull_bytes"] = stats.pull_bytes_sent;
  entry["pull_packet_bytes"] = stats.pull_bytes_encoded;
  entry["push_bytes_received"] = stats.push_bytes_received;
  entry["pull_bytes_received"] = stats.pull_bytes_received;
  entry["received_bytes"] = stats.push_bytes_received + stats.pull_bytes_received;
  entry["local_bytes"] = stats.local_bytes_sent;
  entry["values_pushed"] = stats.values_pushed;
  entry["values_pulled"] = stats.values_pulled;
  entry["encode_seconds"] = stats.encode_seconds;
  entry["decode_seconds"] = stats.decode_seconds;
  entry["error_norm_sum"] = stats.error_norm_sum;
  entry["error_norm_samples"] = stats.error_norm_samples;
  return entry;
}

}  // namespace

void bind_exchange(nb::module_& module) {
  nb::class_<PyLayout>(
      module, "Layout",
      "How a bucket is cut into segments, who owns each, and their codecs.\n\n"
      "tensors: (name, dims) in the order in which they lie in the bucket. raw_codec: what "
      "stands for raw, 'bf16' or 'fp16' where the values are of these types.")
      .def(nb::init<nb::sequence, uint32_t, std::string, std::optional<std::string>, nb::sequence,
                    nb::sequence, uint64_t, std::string, uint32_t>(),
           nb::arg("tensors"), nb::arg("world_size"), nb::arg("codec"), nb::kw_only(),
           nb::arg("pull_codec") = nb::none(), nb::arg("rules") = nb::tuple(),
           nb::arg("exclude") = nb::tuple(), nb::arg("min_numel") = 256,
           nb::arg("raw_codec") = "raw", nb::arg("servers") = 0)
      .def_prop_ro("segments", &PyLayout::segments)
      .def("streams", &PyLayout::streams, nb::arg("rank"),
           "What the rank draws its random words from, for each segment.")
      .def_prop_ro("unmatched", &PyLayout::unmatched,
                   "Patterns of rules and exclude that match none of the tensors.")
      .def_prop_ro("numel", [](const PyLayout& self) { return self.layout()->numel(); })
      .def_prop_ro("workers", [](const PyLayout& self) { return self.layout()->workers(); })
      .def("describe", [](const PyLayout& self) { return self.layout()->describe(); });

  nb::class_<PyExchange>(
      module, "Exchange",
      "An algorithm that averages a bucket over all ranks, without input or output: start, then "
      "send what outgoing() gives and receive from awaiting() until done.\n\n"
      "kind: sharded, ring, terngrad or hierarchical. update (sharded only): called by the owner "
      "of a shard when the bucket holds the shard's averages, to turn them in place into what "
      "everyone gets. machine_of_rank (hierarchical only): the machine of every rank; the layout's "
      "world size is the number of machines, and `between` (by default sharded) the exchange of "
      "one rank of each.")
      .def(nb::init<const PyLayout&, uint32_t, const std::string&, std::optional<nb::callable>,
                    const std::optional<std::vector<uint32_t>>&, const std::optional<std::string>&,
                    int, const std::string&, uint64_t>(),
           nb::arg("layout"), nb::arg("rank"), nb::arg("kind") = "sharded", nb::kw_only(),
           nb::arg("update") = nb::none(), nb::arg("machine_of_rank") = nb::none(),
           nb::arg("between") = nb::none(), nb::arg("threads") = 1, nb::arg("target") = "auto",
           nb::arg("seed") = 0)
      .def("describe", [](PyExchange& self) { return self.exchange().describe(); })
      .def(
          "check_peer",
          [](PyExchange& self, uint32_t peer, const std::string& text) {
            raise_if_error(self.exchange().check_peer(peer, text));
          },
          nb::arg("peer"), nb::arg("text"),
          "Raises GradwireError (peer_mismatch) naming both ranks and where they differ.")
      .def("start", &PyExchange::start, nb::arg("bucket"), nb::arg("step"),
           "Begins a step: encodes the pushes. bucket: float32 [layout.numel], worked in until "
           "done.")
      .def(
          "outgoing", [](nb::handle self) { return take_outgoing(self); },
          "[(peer, uint8 array)]: messages to send now, each handed out once, valid until the "
          "next start.")
      .def(
          "awaiting", [](PyExchange& self) { return self.exchange().awaiting(); },
          "Ranks from which a message is due now.")
      .def("receive", &PyExchange::receive, nb::arg("peer"), nb::arg("message"))
      .def_prop_ro("done", [](PyExchange& self) { return self.exchange().done(); })
      .def_prop_ro("non_finite", &non_finite)
      .def_prop_ro(
          "keeps_residuals", [](PyExchange& self) { return self.exchange().keeps_residuals(); },
          "Whether any segment has a residual on any rank.")
      .def(
          "retract", [](PyExchange& self) { self.exchange().retract(); },
          "Puts what the last step sent back into the residuals, after a step that nobody applied.")
      .def(
          "scale_residuals",
          [](PyExchange& self, float factor) { self.exchange().scale_residuals(factor); },
          nb::arg("factor"))
      .def("export_residuals", &export_residuals)
      .def("import_residual", &import_residual, nb::arg("kind"), nb::arg("name"), nb::arg("offset"),
           nb::arg("values"))
      .def("stats", &stats);

  nb::class_<PyServerExchange, PyExchange>(
      module, "ServerExchange",
      "One rank of the exchange with dedicated servers; layout has `servers`.\n\n"
      "callback: on a server, called without arguments when the bucket holds the averages of its "
      "tensors, to turn them in place into the model's change. On a worker, called with (server, "
      "version) when the bucket holds such a change, to apply it.")
      .def(
          "__init__",
          [](PyServerExchange* self, const PyLayout& layout, uint32_t rank, nb::callable callback,
             uint32_t backup, uint64_t staleness, uint64_t history, int threads,
             const std::string& target, uint64_t seed) {
            new (self) PyServerExchange(layout, rank, std::move(callback),
                                        ServerOptions{.backup = backup,
                                                      .staleness = staleness,
                                                      .history = history,
                                                      .behind = ServerOptions::Behind::kReport},
                                        threads, target, seed);
          },
          nb::arg("layout"), nb::arg("rank"), nb::arg("callback"), nb::kw_only(),
          nb::arg("backup") = 0, nb::arg("staleness") = 0, nb::arg("history") = 64,
          nb::arg("threads") = 1, nb::arg("target") = "auto", nb::arg("seed") = 0)
      .def(
          "version",
          [](PyServerExchange& self, uint32_t server) {
            return self.server_exchange().version(server);
          },
          nb::arg("server"),
          "Versions of the server's tensors: finished by the server, applied by a worker.")
      .def(
          "set_version",
          [](PyServerExchange& self, uint32_t server, uint64_t version) {
            raise_if_error(self.server_exchange().set_version(server, version));
          },
          nb::arg("server"), nb::arg("version"), "Where a run goes on, before its first step.")
      .def_prop_ro(
          "dropped_pushes",
          [](PyServerExchange& self) { return self.server_exchange().dropped_pushes(); },
          "On a server: pushes of each worker that came too late. On a worker: pushes, by the "
          "server's rank, that it did not make, as that server was ahead of another.")
      .def_prop_ro(
          "behind", [](PyServerExchange& self) { return self.server_exchange().behind(); },
          "On a server: workers that lack versions which are kept no more; they need the model.")
      .def(
          "caught_up",
          [](PyServerExchange& self, uint32_t worker) {
            raise_if_error(self.server_exchange().caught_up(worker));
          },
          nb::arg("worker"), "On a server: the worker is given the model of version(rank).")
      .def(
          "catch_up",
          [](PyServerExchange& self, uint32_t server, uint64_t version) {
            raise_if_error(self.server_exchange().catch_up(server, version));
          },
          nb::arg("server"), nb::arg("version"),
          "On a worker: it has the server's tensors as of this version now.");
}

}  // namespace gradwire::python
