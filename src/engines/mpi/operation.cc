// Operations, and the functions of gradwire/mpi.h that make them.

#include "engines/mpi/operation.h"

#include <memory>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/return_if_error.h"
#include "engines/mpi/communicator.h"
#include "gradwire/execution.h"

namespace gradwire::mpi {
namespace {

// Returns the codec without error feedback, for an operation that has no next step.
Result<std::string> without_residual(const std::string& text) {
  GW_ASSIGN_OR_RETURN(const auto codec, Codec::parse(text, FeedbackDefault::kOff));
  if (codec->residual_type() == ResidualType::kNone) return codec->text();
  return Status(StatusCode::kInvalidArgument,
                "'" + text + "': error feedback works only with a persistent operation");
}

Result<Layout> make_layout(const Request& request, const Options& options,
                           const ExchangeInfo& exchange, Memory memory, uint32_t world) {
  LayoutOptions chosen{.codec = options.codec, .pull_codec = options.pull_codec};
  if (chosen.codec.empty()) {
    chosen.codec = memory == Memory::kForgets ? kCodecWithoutResidual : exchange.default_codec;
  }
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
      GW_ASSIGN_OR_RETURN(*codec, without_residual(*codec));
    }
  }
  GW_ASSIGN_OR_RETURN(Layout layout, Layout::create(std::move(tensors), world, chosen));
  if (request.collective == Collective::kAllReduce && layout.numel() != request.count) {
    return Status(StatusCode::kLengthMismatch,
                  "the options' tensors have " + std::to_string(layout.numel()) +
                      " values together, the buffer " + std::to_string(request.count));
  }
  return layout;
}

// The machine of each rank; empty where machines don't matter.
std::vector<uint32_t> choose_machines(const Request& request, const ExchangeChoice& exchange,
                                      const Communicator& communicator) {
  const uint32_t size = exchange.ranks_per_machine();
  if (!exchange.info().between_machines || request.collective != Collective::kAllReduce) return {};
  std::vector<uint32_t> machines = communicator.machines();
  for (uint32_t rank = 0; rank < machines.size() && size > 0; ++rank) machines[rank] = rank / size;
  return machines;
}

Result<std::unique_ptr<Exchange>> make_exchange_of(const Request& request, const std::string& text,
                                                   std::shared_ptr<const Layout> layout,
                                                   uint32_t rank, Execution execution,
                                                   ExchangeOptions options) {
  if (request.collective == Collective::kAllReduce) {
    return make_exchange(text, std::move(layout), rank, std::move(execution), std::move(options));
  }
  const auto make = request.collective == Collective::kReduceScatter ? make_reduce_scatter_exchange
                                                                     : make_allgather_exchange;
  return make(std::move(layout), rank, std::move(execution), options);
}

// The seed of an operation, whose number on its communicator is given. An operation that keeps
// residuals counts its steps from 0, so its number is in the seed; those of others are their steps.
uint64_t seed_of(const Options& options, const Communicator& communicator, Memory memory,
                 uint64_t number) {
  const uint64_t apart = memory == Memory::kForgets ? 0 : (number + 1) << 48;
  return options.seed + communicator.number() + apart;
}

const char* name_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? "float32" : dtype == Dtype::kBfloat16 ? "bfloat16" : "float16";
}

}  // namespace

struct Operation::Implementation {
  Engine engine;
  Buffers buffers;
  Execution execution;
  uint64_t step;
  bool started = false;
  Status failure = {};  // of the engine, which can't be used any more

  // Stores the result of a finished step in the caller's buffer.
  Status finish();
};

Result<Operation> OperationMaker::make(const Request& request, const Options& options,
                                       Memory memory) {
  GW_ASSIGN_OR_RETURN(const auto communicator, Communicator::attach(request.comm));
  const uint32_t rank = communicator->rank();
  const uint32_t world = communicator->size();
  const uint64_t number = communicator->next_operation();  // the engine or a refusal takes it
  const uint64_t step = memory == Memory::kForgets ? number : 0;
  const auto prepare = [&]() -> Result<Operation> {
    GW_RETURN_IF_ERROR(Buffers::check(request, world));
    GW_ASSIGN_OR_RETURN(Execution execution, Execution::create("auto", options.threads));
    GW_ASSIGN_OR_RETURN(Execution copying, Execution::create("auto", options.threads));
    GW_ASSIGN_OR_RETURN(const ExchangeChoice choice, ExchangeChoice::parse(options.exchange));
    const std::vector<uint32_t> machines = choose_machines(request, choice, *communicator);
    const std::set<uint32_t> different(machines.begin(), machines.end());
    GW_ASSIGN_OR_RETURN(
        Layout layout,
        make_layout(request, options, choice.inner(), memory,
                    machines.empty() ? world : static_cast<uint32_t>(different.size())));
    // Whether a sum is wanted of an exchange that can only average.
    const bool scaled = request.collective == Collective::kAllReduce &&
                        request.reduction == Reduction::kSum && !choice.inner().sums;
    GW_ASSIGN_OR_RETURN(
        auto exchange,
        make_exchange_of(request, choice.text(), std::make_shared<const Layout>(std::move(layout)),
                         rank, std::move(execution),
                         {.seed = seed_of(options, *communicator, memory, number),
                          .reduction = scaled ? Reduction::kAverage : request.reduction,
                          .machine_of_rank = machines}));
    Buffers buffers(request, rank, world, scaled ? static_cast<float>(world) : 1.0f);
    GW_ASSIGN_OR_RETURN(
        Engine engine,
        Engine::create(request.comm, std::move(exchange), options.timeout_seconds,
                       std::string("values of ") + name_of(request.dtype) + "\n" +
                           (scaled ? "sum: the average times the number of ranks\n" : "")));
    return Operation(std::make_unique<Operation::Implementation>(Operation::Implementation{
        std::move(engine), std::move(buffers), std::move(copying), step}));
  };
  try {
    Result<Operation> operation = prepare();
    if (!operation.ok()) return Engine::refuse(request.comm, operation.status());
    return operation;
  } catch (const std::bad_alloc&) {
    // Where the engine has taken the number, another refusal would put this rank out of step.
    if (communicator->next_operation() == number) {
      (void)Engine::refuse(request.comm, {StatusCode::kLimitExceeded, "out of memory"});
    }
    throw;
  }
}

Result<Operation> OperationMaker::start(const Request& request, const Options& options) {
  GW_ASSIGN_OR_RETURN(Operation operation, make(request, options, Memory::kForgets));
  GW_RETURN_IF_ERROR(operation.start());
  return operation;
}

Status OperationMaker::run(const Request& request, const Options& options) {
  GW_ASSIGN_OR_RETURN(Operation operation, start(request, options));
  return operation.wait();
}

Status Operation::Implementation::finish() {
  GW_RETURN_IF_ERROR(buffers.store(execution));
  Exchange& exchange = engine.exchange();
  const std::optional<NonFiniteInput>& origin = exchange.non_finite();
  if (!origin) return {};
  exchange.retract();
  return {StatusCode::kNonFinite,
          describe(*origin, "a value") + "; the results hold NaN or Inf on every rank"};
}

Operation::Operation(std::unique_ptr<Implementation> implementation)
    : implementation_(std::move(implementation)) {}
Operation::Operation(Operation&&) noexcept = default;
Operation& Operation::operator=(Operation&&) noexcept = default;
Operation::~Operation() = default;

Status Operation::start() {
  Implementation& own = *implementation_;
  if (own.started) {
    return {StatusCode::kUnexpectedMessage, "start: the operation is under way; wait for it first"};
  }
  GW_ASSIGN_OR_RETURN(const std::span<float> bucket, own.buffers.load(own.execution));
  own.failure = own.engine.start(bucket, own.step);
  GW_RETURN_IF_ERROR(own.failure);
  ++own.step;
  own.started = true;
  return {};
}

Result<bool> Operation::test() {
  if (implementation_->started) {
    const Result<bool> done = implementation_->engine.test();
    if (done.ok() && !done.value()) return false;
  }
  GW_RETURN_IF_ERROR(wait());
  return true;
}

Status Operation::wait() {
  Implementation& own = *implementation_;
  const bool started = std::exchange(own.started, false);
  if (started) own.failure = own.engine.wait();
  GW_RETURN_IF_ERROR(own.failure);
  return started ? own.finish() : Status();
}

const ExchangeStats& Operation::stats() const noexcept {
  return implementation_->engine.exchange().stats();
}
const Layout& Operation::layout() const noexcept {
  return implementation_->engine.exchange().layout();
}
Traffic Operation::traffic() const noexcept {
  const Engine& engine = implementation_->engine;
  return {.bytes_sent = engine.bytes_sent(), .bytes_received = engine.bytes_received()};
}

Status all_reduce(const void* sendbuf, void* recvbuf, uint64_t count, Dtype dtype,
                  Reduction reduction, MPI_Comm comm, const Options& options) {
  return OperationMaker::run(
      {Collective::kAllReduce, sendbuf, recvbuf, count, dtype, reduction, comm}, options);
}

Result<Operation> iall_reduce(const void* sendbuf, void* recvbuf, uint64_t count, Dtype dtype,
                              Reduction reduction, MPI_Comm comm, const Options& options) {
  return OperationMaker::start(
      {Collective::kAllReduce, sendbuf, recvbuf, count, dtype, reduction, comm}, options);
}

Result<Operation> all_reduce_init(const void* sendbuf, void* recvbuf, uint64_t count, Dtype dtype,
                                  Reduction reduction, MPI_Comm comm, const Options& options) {
  return OperationMaker::make(
      {Collective::kAllReduce, sendbuf, recvbuf, count, dtype, reduction, comm}, options);
}

Status reduce_scatter(const void* sendbuf, void* recvbuf, uint64_t recvcount, Dtype dtype,
                      Reduction reduction, MPI_Comm comm, const Options& options) {
  return OperationMaker::run(
      {Collective::kReduceScatter, sendbuf, recvbuf, recvcount, dtype, reduction, comm}, options);
}

Result<Operation> reduce_scatter_init(const void* sendbuf, void* recvbuf, uint64_t recvcount,
                                      Dtype dtype, Reduction reduction, MPI_Comm comm,
                                      const Options& options) {
  return OperationMaker::make(
      {Collective::kReduceScatter, sendbuf, recvbuf, recvcount, dtype, reduction, comm}, options);
}

Status allgather(const void* sendbuf, void* recvbuf, uint64_t sendcount, Dtype dtype, MPI_Comm comm,
                 const Options& options) {
  return OperationMaker::run(
      {Collective::kAllgather, sendbuf, recvbuf, sendcount, dtype, Reduction::kAverage, comm},
      options);
}

Result<Operation> allgather_init(const void* sendbuf, void* recvbuf, uint64_t sendcount,
                                 Dtype dtype, MPI_Comm comm, const Options& options) {
  return OperationMaker::make(
      {Collective::kAllgather, sendbuf, recvbuf, sendcount, dtype, Reduction::kAverage, comm},
      options);
}

}  // namespace gradwire::mpi
