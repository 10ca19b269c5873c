// The functions of gradwire/mpi.h.

#include "base/return_if_error.h"
#include "engines/mpi/operation.h"

namespace gradwire::mpi {

Status all_reduce(const void* sendbuf, void* recvbuf, uint64_t count, Dtype dtype,
                  Reduction reduction, MPI_Comm comm, const Options& options) {
  return OperationMaker::run(
      {Collective::kAllReduce, sendbuf, recvbuf, count, dtype, reduction, comm}, options);
}

Result<Operation> iall_reduce(const void* sendbuf, void* recvbuf, uint64_t count, Dtype dtype,
                              Reduction reduction, MPI_Comm comm, const Options& options) {
  Result<Operation> operation = OperationMaker::make(
      {Collective::kAllReduce, sendbuf, recvbuf, count, dtype, reduction, comm}, options,
      Memory::kForgets);
  if (operation.ok()) GW_RETURN_IF_ERROR(operation.value().start());
  return operation;
}

Result<Operation> all_reduce_init(const void* sendbuf, void* recvbuf, uint64_t count, Dtype dtype,
                                  Reduction reduction, MPI_Comm comm, const Options& options) {
  return OperationMaker::make(
      {Collective::kAllReduce, sendbuf, recvbuf, count, dtype, reduction, comm}, options,
      Memory::kKeepsResiduals);
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
      {Collective::kReduceScatter, sendbuf, recvbuf, recvcount, dtype, reduction, comm}, options,
      Memory::kKeepsResiduals);
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
      options, Memory::kKeepsResiduals);
}

}  // namespace gradwire::mpi
