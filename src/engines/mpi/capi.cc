// The functions of gradwire_mpi.h, implemented with gradwire/mpi.h.

#include <utility>

#include "base/return_if_error.h"
#include "capi/arguments.h"
#include "capi/errors.h"
#include "engines/mpi/operation.h"
#include "gradwire/gradwire_mpi.h"

using namespace gradwire;
using capi::check_given;
using capi::guarded;
using mpi::Collective;
using mpi::OperationMaker;

struct gw_operation {
  mpi::Operation operation;
};

namespace {

// The arguments of a collective call.
struct Arguments {
  Collective collective;
  const void* sendbuf;
  void* recvbuf;
  uint64_t count;
  gw_dtype datatype;
  gw_op op;
  MPI_Comm comm;
  const gw_mpi_options* options;
};

Result<mpi::Options> read_options(const gw_mpi_options* given) {
  if (given == nullptr) return mpi::Options();
  GW_RETURN_IF_ERROR(check_given({{"the options' exchange", given->exchange}}));
  GW_ASSIGN_OR_RETURN(auto tensors, capi::read_tensors(given->tensors, given->tensor_count));
  gw_mpi_options named = *given;
  if (named.codec == nullptr) named.codec = "";
  GW_ASSIGN_OR_RETURN(LayoutOptions layout, capi::read_layout_options(named));
  return mpi::Options{.codec = std::move(layout.codec),
                      .pull_codec = std::move(layout.pull_codec),
                      .exchange = given->exchange,
                      .seed = given->seed,
                      .threads = given->threads,
                      .timeout_seconds = given->timeout_seconds,
                      .tensors = std::move(tensors),
                      .rules = std::move(layout.rules),
                      .exclude = std::move(layout.exclude),
                      .min_numel = layout.min_numel};
}

Result<mpi::Request> read_request(const Arguments& given) {
  GW_ASSIGN_OR_RETURN(const Dtype dtype, capi::read_dtype(given.datatype));
  if (given.op != GW_SUM && given.op != GW_AVERAGE) {
    return Status(StatusCode::kInvalidArgument,
                  "op " + std::to_string(given.op) + " is none of GW_SUM, GW_AVERAGE");
  }
  return mpi::Request{.collective = given.collective,
                      .sendbuf = given.sendbuf,
                      .recvbuf = given.recvbuf,
                      .count = given.count,
                      .dtype = dtype,
                      .reduction = given.op == GW_SUM ? Reduction::kSum : Reduction::kAverage,
                      .comm = given.comm};
}

// Returns the Status of work(request, options). Tells other ranks if the arguments are invalid.
template <typename Work>
gw_status call(const Arguments& given, const Work& work) noexcept {
  return guarded({}, [&]() -> Status {
    const Result<mpi::Request> request = read_request(given);
    if (!request.ok()) return mpi::Engine::refuse(given.comm, request.status());
    const Result<mpi::Options> options = read_options(given.options);
    if (!options.ok()) return mpi::Engine::refuse(given.comm, options.status());
    return work(request.value(), options.value());
  });
}

// Like call, for work that returns an Operation.
template <typename Work>
gw_status make(const Arguments& given, gw_operation** operation, const Work& work) noexcept {
  return call(given, [&](const mpi::Request& request, const mpi::Options& options) -> Status {
    const Status usable = check_given({{"operation", operation}});
    if (!usable.ok()) return mpi::Engine::refuse(given.comm, usable);
    GW_ASSIGN_OR_RETURN(mpi::Operation made, work(request, options));
    *operation = new gw_operation{std::move(made)};
    return {};
  });
}

Result<mpi::Operation> make_persistent(const mpi::Request& request, const mpi::Options& options) {
  return OperationMaker::make(request, options);
}

}  // namespace

extern "C" {

void gw_mpi_options_init(gw_mpi_options* options) {
  *options = {.codec = nullptr,
              .pull_codec = nullptr,
              .exchange = "sharded",
              .seed = 0,
              .threads = 1,
              .timeout_seconds = mpi::kDefaultTimeout,
              .tensors = nullptr,
              .tensor_count = 0,
              .rules = nullptr,
              .rule_count = 0,
              .exclude = nullptr,
              .exclude_count = 0,
              .min_numel = 256};
}

gw_status gw_allreduce(const void* sendbuf, void* recvbuf, uint64_t count, gw_dtype datatype,
                       gw_op op, MPI_Comm comm, const gw_mpi_options* options) {
  return call({Collective::kAllReduce, sendbuf, recvbuf, count, datatype, op, comm, options},
              OperationMaker::run);
}

gw_status gw_reduce_scatter(const void* sendbuf, void* recvbuf, uint64_t recvcount,
                            gw_dtype datatype, gw_op op, MPI_Comm comm,
                            const gw_mpi_options* options) {
  return call(
      {Collective::kReduceScatter, sendbuf, recvbuf, recvcount, datatype, op, comm, options},
      OperationMaker::run);
}

gw_status gw_allgather(const void* sendbuf, void* recvbuf, uint64_t sendcount, gw_dtype datatype,
                       MPI_Comm comm, const gw_mpi_options* options) {
  return call(
      {Collective::kAllgather, sendbuf, recvbuf, sendcount, datatype, GW_AVERAGE, comm, options},
      OperationMaker::run);
}

gw_status gw_iallreduce(const void* sendbuf, void* recvbuf, uint64_t count, gw_dtype datatype,
                        gw_op op, MPI_Comm comm, const gw_mpi_options* options,
                        gw_operation** operation) {
  return make({Collective::kAllReduce, sendbuf, recvbuf, count, datatype, op, comm, options},
              operation, OperationMaker::start);
}

gw_status gw_allreduce_init(const void* sendbuf, void* recvbuf, uint64_t count, gw_dtype datatype,
                            gw_op op, MPI_Comm comm, const gw_mpi_options* options,
                            gw_operation** operation) {
  return make({Collective::kAllReduce, sendbuf, recvbuf, count, datatype, op, comm, options},
              operation, make_persistent);
}

gw_status gw_reduce_scatter_init(const void* sendbuf, void* recvbuf, uint64_t recvcount,
                                 gw_dtype datatype, gw_op op, MPI_Comm comm,
                                 const gw_mpi_options* options, gw_operation** operation) {
  return make(
      {Collective::kReduceScatter, sendbuf, recvbuf, recvcount, datatype, op, comm, options},
      operation, make_persistent);
}

gw_status gw_allgather_init(const void* sendbuf, void* recvbuf, uint64_t sendcount,
                            gw_dtype datatype, MPI_Comm comm, const gw_mpi_options* options,
                            gw_operation** operation) {
  return make(
      {Collective::kAllgather, sendbuf, recvbuf, sendcount, datatype, GW_AVERAGE, comm, options},
      operation, make_persistent);
}

gw_status gw_start(gw_operation* operation) {
  return guarded({{"operation", operation}}, [&] { return operation->operation.start(); });
}

gw_status gw_test(gw_operation* operation, int* done) {
  return guarded({{"operation", operation}, {"done", done}}, [&]() -> Status {
    GW_ASSIGN_OR_RETURN(*done, operation->operation.test());
    return {};
  });
}

gw_status gw_wait(gw_operation* operation) {
  return guarded({{"operation", operation}}, [&] { return operation->operation.wait(); });
}

void gw_operation_free(gw_operation* operation) { delete operation; }

gw_status gw_operation_traffic(const gw_operation* operation, uint64_t* bytes_sent,
                               uint64_t* bytes_received) {
  return guarded(
      {{"operation", operation}, {"bytes_sent", bytes_sent}, {"bytes_received", bytes_received}},
      [&]() -> Status {
        const mpi::Traffic traffic = operation->operation.traffic();
        *bytes_sent = traffic.bytes_sent;
        *bytes_received = traffic.bytes_received;
        return {};
      });
}

}  // extern "C"
