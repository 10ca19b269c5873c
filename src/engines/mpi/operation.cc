#include "engines/mpi/operation.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/return_if_error.h"
#include "engines/mpi/communicator.h"

namespace gradwire::mpi {
namespace {

// The codec without error feedback, for an operation that has no next step.
Result<std::string> without_residual(const std::string& text) {
  Result<std::shared_ptr<const Codec>> codec = Codec::parse(text, FeedbackDefault::kOff);
  if (!codec.ok()) return codec.status();
  if (codec.value()->residual_type() == ResidualType::kNone) return codec.value()->text();
  return Status(StatusCode::kInvalidArgument,
                "'" + text + "': error feedback works only with a persistent operation");
}

Result<Layout> make_layout(const Request& request, const Options& options, Memory memory,
                           uint32_t world) {
  LayoutOptions chosen{.codec = options.codec, .pull_codec = options.pull_codec};
  std::vector<TensorInfo> tensors;
  if (request.collective != Collective::kAllReduce) {
    for (uint32_t r = 0; r < world; ++r) {
      tensors.push_back({"block " + std::to_string(r), {request.count, 1}});
    }
    chosen.pull_codec.clear();
    chosen.min_numel = 0;
  } else if (options.tensors.empty()) {
    tensors.push_back({"buffer", {request.count, 1}});
    chosen.min_numel = 0;
  } else {
    tensors = options.tensors;
    chosen.rules = options.rules;
    chosen.exclude = options.exclude;
    chosen.min_numel = options.min_numel;
  }
  if (memory == Memory::kForgets) {
    std::vector<std::string*> codecs = {&chosen.codec};
    if (!chosen.pull_codec.empty()) codecs.push_back(&chosen.pull_codec);
    for (LayoutRule& rule : chosen.rules) codecs.push_back(&rule.codec);
    for (std::string* codec : codecs) {
      Result<std::string> changed = without_residual(*codec);
      if (!changed.ok()) return changed.status();
      *codec = std::move(changed).value();
    }
  }
  Result<Layout> layout = Layout::create(std::move(tensors), world, chosen);
  if (layout.ok() && request.collective == Collective::kAllReduce &&
      layout.value().numel() != request.count) {
    return Status(StatusCode::kLengthMismatch,
                  "the options' tensors have " + std::to_string(layout.value().numel()) +
                      " values together, the buffer " + std::to_string(request.count));
  }
  return layout;
}

// By rank; empty where machines don't matter.
std::vector<uint32_t> choose_machines(const Request& request, const ExchangeChoice& exchange,
                                      const Communicator& communicator) {
  const uint32_t size = exchange.ranks_per_machine();
  if (!exchange.info().between_machines || request.collective != Collective::kAllReduce) return {};
  std::vector<uint32_t> machines = communicator.machines();
  for (uint32_t rank = 0; rank < machines.size() && size > 0; ++rank) machines[rank] = rank / size;
  return machines;
}

uint32_t count_machines(const std::vector<uint32_t>& machines) {
  return static_cast<uint32_t>(std::set<uint32_t>(machines.begin(), machines.end()).size());
}

// Whether the exchange averages where a sum is wanted, as it knows no other way.
bool is_scaled_average(const Request& request, const ExchangeChoice& exchange) {
  return request.collective == Collective::kAllReduce && request.reduction == Reduction::kSum &&
         !exchange.inner().sums;
}

Result<std::unique_ptr<Exchange>> make_exchange_of(const Request& request,
                                                   const ExchangeChoice& exchange,
                                                   std::shared_ptr<const Layout> layout,
                                                   uint32_t rank, Execution execution,
                                                   ExchangeOptions options) {
  switch (request.collective) {
    case Collective::kAllReduce:
      return make_exchange(exchange.text(), std::move(layout), rank, std::move(execution),
                           std::move(options));
    case Collective::kReduceScatter:
      return make_reduce_scatter_exchange(std::move(layout), rank, std::move(execution), options);
    case Collective::kAllgather:
      return make_allgather_exchange(std::move(layout), rank, std::move(execution), options);
  }
  return Status(StatusCode::kInvalidArgument, "no such collective operation");
}

const char* name_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? "float32" : dtype == Dtype::kBfloat16 ? "bfloat16" : "float16";
}

}  // namespace

Result<Operation> OperationMaker::make(const Request& request, const Options& options,
                                       Memory memory) {
  Result<std::shared_ptr<Communicator>> communicator = Communicator::attach(request.comm);
  if (!communicator.ok()) return communicator.status();
  const uint32_t rank = communicator.value()->rank();
  const uint32_t world = communicator.value()->size();
  const auto prepare = [&]() -> Result<Operation> {
    GW_RETURN_IF_ERROR(Buffers::check(request, world));
    Result<Execution> execution = Execution::create("auto", options.threads);
    if (!execution.ok()) return execution.status();
    Result<Execution> copying = Execution::create("auto", options.threads);
    if (!copying.ok()) return copying.status();
    Result<ExchangeChoice> choice = ExchangeChoice::parse(options.exchange);
    if (!choice.ok()) return choice.status();
    const std::vector<uint32_t> machines =
        choose_machines(request, choice.value(), *communicator.value());
    Result<Layout> layout =
        make_layout(request, options, memory, machines.empty() ? world : count_machines(machines));
    if (!layout.ok()) return layout.status();
    const bool scaled = is_scaled_average(request, choice.value());
    Result<std::unique_ptr<Exchange>> exchange = make_exchange_of(
        request, choice.value(), std::make_shared<const Layout>(std::move(layout).value()), rank,
        std::move(execution).value(),
        {.seed = options.seed,
         .reduction = scaled ? Reduction::kAverage : request.reduction,
         .machine_of_rank = machines});
    if (!exchange.ok()) return exchange.status();
    Buffers buffers(request, rank, world, scaled ? static_cast<float>(world) : 1.0f);
    Result<Engine> engine =
        Engine::create(request.comm, std::move(exchange).value(), options.timeout_seconds,
                       std::string("values of ") + name_of(request.dtype) + "\n" +
                           (scaled ? "sum: the average times the number of ranks\n" : ""));
    if (!engine.ok()) return engine.status();
    return Operation(std::make_unique<Operation::Implementation>(
        std::move(engine).value(), std::move(buffers), std::move(copying).value()));
  };
  Result<Operation> operation = prepare();
  if (!operation.ok()) return Engine::refuse(request.comm, operation.status());
  return operation;
}

Status OperationMaker::run(const Request& request, const Options& options) {
  Result<Operation> operation = make(request, options, Memory::kForgets);
  if (!operation.ok()) return operation.status();
  GW_RETURN_IF_ERROR(operation.value().start());
  return operation.value().wait();
}

Operation::Implementation::Implementation(Engine engine, Buffers buffers, Execution execution)
    : engine_(std::move(engine)), buffers_(std::move(buffers)), execution_(std::move(execution)) {}

Status Operation::Implementation::start() {
  if (started_) {
    return {StatusCode::kUnexpectedMessage, "start: the operation is under way; wait for it first"};
  }
  GW_RETURN_IF_ERROR(engine_.start(buffers_.load(execution_), step_));
  ++step_;
  started_ = true;
  return {};
}

Result<bool> Operation::Implementation::test() {
  if (!started_) return true;
  Result<bool> done = engine_.test();
  if (!done.ok() || done.value()) started_ = false;
  if (!done.ok() || !done.value()) return done;
  GW_RETURN_IF_ERROR(finish());
  return true;
}

Status Operation::Implementation::wait() {
  if (!started_) return {};
  started_ = false;
  GW_RETURN_IF_ERROR(engine_.wait());
  return finish();
}

Status Operation::Implementation::finish() {
  buffers_.store(execution_);
  Exchange& exchange = engine_.exchange();
  const std::optional<NonFiniteInput>& origin = exchange.non_finite();
  if (!origin) return {};
  exchange.retract();
  return {StatusCode::kNonFinite, "rank " + std::to_string(origin->rank) + ": value " +
                                      std::to_string(origin->element) + " of '" + origin->tensor +
                                      "' is NaN or Inf, and so are results on every rank"};
}

Operation::Operation(std::unique_ptr<Implementation> implementation)
    : implementation_(std::move(implementation)) {}
Operation::Operation(Operation&&) noexcept = default;
Operation& Operation::operator=(Operation&&) noexcept = default;
Operation::~Operation() = default;

Status Operation::start() { return implementation_->start(); }
Result<bool> Operation::test() { return implementation_->test(); }
Status Operation::wait() { return implementation_->wait(); }
const ExchangeStats& Operation::stats() const noexcept {
  return implementation_->engine().exchange().stats();
}
const Layout& Operation::layout() const noexcept {
  return implementation_->engine().exchange().layout();
}
Traffic Operation::traffic() const noexcept {
  const Engine& engine = implementation_->engine();
  return {.bytes_sent = engine.bytes_sent(), .bytes_received = engine.bytes_received()};
}

}  // namespace gradwire::mpi
