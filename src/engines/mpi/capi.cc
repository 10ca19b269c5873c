// gradwire_mpi.h over gradwire/mpi.h.

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "base/return_if_error.h"
#include "capi/errors.h"
#include "gradwire/gradwire_mpi.h"
#include "gradwire/mpi.h"

using namespace gradwire;
using capi::check_given;
using capi::check_values;

struct gw_operation {
  mpi::Operation operation;
};

namespace {

struct Arguments {
  Dtype dtype = Dtype::kFloat32;
  Reduction reduction = Reduction::kSum;
  mpi::Options options;
};

Result<mpi::Options> read_options(const gw_mpi_options* given) {
  mpi::Options options;
  if (given == nullptr) return options;
  GW_RETURN_IF_ERROR(check_given("codec", given->codec));
  GW_RETURN_IF_ERROR(check_given("exchange", given->exchange));
  GW_RETURN_IF_ERROR(check_values("tensors", given->tensors, given->tensor_count));
  GW_RETURN_IF_ERROR(check_values("rules", given->rules, given->rule_count));
  GW_RETURN_IF_ERROR(check_values("exclude", given->exclude, given->exclude_count));
  options.codec = given->codec;
  if (given->pull_codec != nullptr) options.pull_codec = given->pull_codec;
  GW_RETURN_IF_ERROR(ExchangeChoice::parse(given->exchange).status());
  options.exchange = given->exchange;
  options.seed = given->seed;
  options.threads = given->threads;
  options.timeout_seconds = given->timeout_seconds;
  for (size_t i = 0; i < given->tensor_count; ++i) {
    const gw_tensor& tensor = given->tensors[i];
    GW_RETURN_IF_ERROR(check_given("name", tensor.name));
    GW_RETURN_IF_ERROR(check_values("dims", tensor.dims, tensor.dim_count));
    options.tensors.push_back({tensor.name, {tensor.dims, tensor.dims + tensor.dim_count}});
  }
  for (size_t i = 0; i < given->rule_count; ++i) {
    const gw_rule& rule = given->rules[i];
    GW_RETURN_IF_ERROR(check_given("pattern", rule.pattern));
    GW_RETURN_IF_ERROR(check_given("codec of a rule", rule.codec));
    if (rule.role < GW_PUSH_AND_PULL || rule.role > GW_PULL) {
      return Status(StatusCode::kInvalidArgument, "role " + std::to_string(rule.role) + " is none");
    }
    options.rules.push_back({rule.pattern, rule.codec});
    if (rule.role == GW_PUSH_AND_PULL) continue;
    options.rules.back().direction = rule.role == GW_PUSH ? Direction::kPush : Direction::kPull;
  }
  for (size_t i = 0; i < given->exclude_count; ++i) {
    GW_RETURN_IF_ERROR(check_given("exclude", given->exclude[i]));
    options.exclude.emplace_back(given->exclude[i]);
  }
  options.min_numel = given->min_numel;
  return options;
}

Result<Arguments> read_arguments(gw_dtype datatype, gw_op op, const gw_mpi_options* given) {
  if (datatype < GW_F32 || datatype > GW_F16) {
    return Status(StatusCode::kUnsupportedDtype,
                  "datatype " + std::to_string(datatype) + " is none of GW_F32, GW_BF16, GW_F16");
  }
  if (op != GW_SUM && op != GW_AVERAGE) {
    return Status(StatusCode::kInvalidArgument,
                  "op " + std::to_string(op) + " is none of GW_SUM, GW_AVERAGE");
  }
  Result<mpi::Options> options = read_options(given);
  if (!options.ok()) return options.status();
  return Arguments{.dtype = static_cast<Dtype>(datatype),
                   .reduction = op == GW_SUM ? Reduction::kSum : Reduction::kAverage,
                   .options = std::move(options).value()};
}

// What work(), a Status, comes to in C. No exception passes.
template <typename Work>
gw_status guarded(const Work& work) noexcept {
  try {
    const Status status = work();
    return gw_set_last_error(static_cast<gw_status>(status.code()), status.message().c_str());
  } catch (const std::bad_alloc&) {
    return gw_set_last_error(GW_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return gw_set_last_error(GW_INTERNAL_ERROR, error.what());
  }
}

// body(arguments), a Status. Where the arguments make no sense, the others are told.
template <typename Body>
gw_status call(gw_dtype datatype, gw_op op, MPI_Comm comm, const gw_mpi_options* options,
               const Body& body) noexcept {
  return guarded([&]() -> Status {
    Result<Arguments> arguments = read_arguments(datatype, op, options);
    if (!arguments.ok()) return mpi::Engine::refuse(comm, arguments.status());
    return body(arguments.value());
  });
}

// As call, for a body that gives an Operation.
template <typename Body>
gw_status make(gw_dtype datatype, gw_op op, MPI_Comm comm, const gw_mpi_options* options,
               gw_operation** operation, const Body& body) noexcept {
  return call(datatype, op, comm, options, [&](const Arguments& arguments) -> Status {
    if (operation == nullptr) {
      return mpi::Engine::refuse(comm, check_given("operation", operation));
    }
    Result<mpi::Operation> made = body(arguments);
    if (!made.ok()) return made.status();
    *operation = new gw_operation{std::move(made).value()};
    return {};
  });
}

}  // namespace

extern "C" {

void gw_mpi_options_init(gw_mpi_options* options) {
  *options = {.codec = "3lc",
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
  return call(datatype, op, comm, options, [&](const Arguments& a) {
    return mpi::all_reduce(sendbuf, recvbuf, count, a.dtype, a.reduction, comm, a.options);
  });
}

gw_status gw_reduce_scatter(const void* sendbuf, void* recvbuf, uint64_t recvcount,
                            gw_dtype datatype, gw_op op, MPI_Comm comm,
                            const gw_mpi_options* options) {
  return call(datatype, op, comm, options, [&](const Arguments& a) {
    return mpi::reduce_scatter(sendbuf, recvbuf, recvcount, a.dtype, a.reduction, comm, a.options);
  });
}

gw_status gw_allgather(const void* sendbuf, void* recvbuf, uint64_t sendcount, gw_dtype datatype,
                       MPI_Comm comm, const gw_mpi_options* options) {
  return call(datatype, GW_SUM, comm, options, [&](const Arguments& a) {
    return mpi::allgather(sendbuf, recvbuf, sendcount, a.dtype, comm, a.options);
  });
}

gw_status gw_iallreduce(const void* sendbuf, void* recvbuf, uint64_t count, gw_dtype datatype,
                        gw_op op, MPI_Comm comm, const gw_mpi_options* options,
                        gw_operation** operation) {
  return make(datatype, op, comm, options, operation, [&](const Arguments& a) {
    return mpi::iall_reduce(sendbuf, recvbuf, count, a.dtype, a.reduction, comm, a.options);
  });
}

gw_status gw_allreduce_init(const void* sendbuf, void* recvbuf, uint64_t count, gw_dtype datatype,
                            gw_op op, MPI_Comm comm, const gw_mpi_options* options,
                            gw_operation** operation) {
  return make(datatype, op, comm, options, operation, [&](const Arguments& a) {
    return mpi::all_reduce_init(sendbuf, recvbuf, count, a.dtype, a.reduction, comm, a.options);
  });
}

gw_status gw_reduce_scatter_init(const void* sendbuf, void* recvbuf, uint64_t recvcount,
                                 gw_dtype datatype, gw_op op, MPI_Comm comm,
                                 const gw_mpi_options* options, gw_operation** operation) {
  return make(datatype, op, comm, options, operation, [&](const Arguments& a) {
    return mpi::reduce_scatter_init(sendbuf, recvbuf, recvcount, a.dtype, a.reduction, comm,
                                    a.options);
  });
}

gw_status gw_allgather_init(const void* sendbuf, void* recvbuf, uint64_t sendcount,
                            gw_dtype datatype, MPI_Comm comm, const gw_mpi_options* options,
                            gw_operation** operation) {
  return make(datatype, GW_SUM, comm, options, operation, [&](const Arguments& a) {
    return mpi::allgather_init(sendbuf, recvbuf, sendcount, a.dtype, comm, a.options);
  });
}

gw_status gw_start(gw_operation* operation) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("operation", operation));
    return operation->operation.start();
  });
}

gw_status gw_test(gw_operation* operation, int* done) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("operation", operation));
    GW_RETURN_IF_ERROR(check_given("done", done));
    Result<bool> tested = operation->operation.test();
    if (!tested.ok()) return tested.status();
    *done = tested.value() ? 1 : 0;
    return {};
  });
}

gw_status gw_wait(gw_operation* operation) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("operation", operation));
    return operation->operation.wait();
  });
}

void gw_operation_free(gw_operation* operation) { delete operation; }

gw_status gw_operation_traffic(const gw_operation* operation, uint64_t* bytes_sent,
                               uint64_t* bytes_received) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("operation", operation));
    GW_RETURN_IF_ERROR(check_given("bytes_sent", bytes_sent));
    GW_RETURN_IF_ERROR(check_given("bytes_received", bytes_received));
    const mpi::Traffic traffic = operation->operation.traffic();
    *bytes_sent = traffic.bytes_sent;
    *bytes_received = traffic.bytes_received;
    return {};
  });
}

}  // extern "C"
