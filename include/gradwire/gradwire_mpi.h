/*
 * gradwire's compressed collectives over MPI in C (C99). Errors, strings and handles as in
 * gradwire.h; library gradwire_mpi.
 *
 * The rules for communicators, threads and residuals are those of gradwire/mpi.h. In short: the
 * first call on a communicator duplicates it and is collective; with MPI_THREAD_MULTIPLE threads
 * may work at the same time, each on its own communicator; only persistent operations have error
 * feedback.
 *
 * Buffers may be in the memory of a CUDA device; they are copied to the host and back.
 *
 * In all calls sendbuf may be MPI_IN_PLACE; recvbuf is then input and output. Results have the same
 * bits on every rank.
 *
 *   GW_PEER_MISMATCH  the ranks' arguments differ, or a rank can't take part; on every rank, naming
 *                     two ranks and the difference
 *   GW_PEER_LOST      a rank was silent for the timeout; the message names it
 *   GW_NON_FINITE     on every rank: some rank's values were NaN or Inf; the message names it, and
 *                     the results are NaN. A persistent operation can be started again.
 *   GW_DEVICE_ERROR   a copy to or from the device failed; the other ranks get GW_PEER_LOST
 *   GW_UNKNOWN_CODEC, GW_BAD_PARAMETER, GW_UNSUPPORTED_DTYPE, GW_LENGTH_MISMATCH,
 *   GW_LIMIT_EXCEEDED, GW_INVALID_ARGUMENT  (the other ranks then get GW_PEER_MISMATCH)
 */
#ifndef GRADWIRE_GRADWIRE_MPI_H_
#define GRADWIRE_GRADWIRE_MPI_H_

#include <mpi.h>

#include "gradwire/gradwire.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t gw_op;
#define GW_SUM 0
#define GW_AVERAGE 1

typedef struct gw_mpi_options {
  const char* codec; /* NULL: the default_codec of the exchange's gw_exchange_info in persistent
                        operations; "bf16" in others, which keep no residual */
  const char* pull_codec; /* NULL: as codec */
  const char* exchange;   /* of gw_allreduce: "sharded", or another of gw_exchange_info_at, such as
                             "hierarchical:between=ring,ranks=4" (without parameters: sharded
                             between the machines; ranks per machine: as MPI says) */
  uint64_t seed;          /* of stochastic codecs: 0 */
  int threads;            /* 1 */
  double timeout_seconds; /* 60 */
  /* The tensors that an all-reduced buffer holds, one after the other. None: the buffer is one
     tensor, and the codec applies to all of it. Otherwise small tensors go raw as in
     gw_layout_options. */
  const gw_tensor* tensors;
  size_t tensor_count;
  const gw_rule* rules;
  size_t rule_count;
  const char* const* exclude;
  size_t exclude_count;
  uint64_t min_numel; /* 256 */
} gw_mpi_options;

/* Sets the defaults; set other values afterwards. Where a function takes options, NULL means the
   defaults. */
GW_API void gw_mpi_options_init(gw_mpi_options* options);

/* ---- blocking ------------------------------------------------------------------------------ */

/* The sum or average of count values over all ranks. */
GW_API gw_status gw_allreduce(const void* sendbuf, void* recvbuf, uint64_t count, gw_dtype datatype,
                              gw_op op, MPI_Comm comm, const gw_mpi_options* options);
/* Rank r gets block r of the result. A block has recvcount values, and sendbuf has a block for each
   rank. In place, the result is the first block of recvbuf. */
GW_API gw_status gw_reduce_scatter(const void* sendbuf, void* recvbuf, uint64_t recvcount,
                                   gw_dtype datatype, gw_op op, MPI_Comm comm,
                                   const gw_mpi_options* options);
/* Every rank gets the blocks of all ranks. In place, the input is this rank's block of recvbuf. */
GW_API gw_status gw_allgather(const void* sendbuf, void* recvbuf, uint64_t sendcount,
                              gw_dtype datatype, MPI_Comm comm, const gw_mpi_options* options);

/* ---- non-blocking and persistent ----------------------------------------------------------- */

/* An operation that is bound to its buffers. Its bytes move only in gw_test and gw_wait. */
typedef struct gw_operation gw_operation;

/* The operation is started; wait for it and free it. */
GW_API gw_status gw_iallreduce(const void* sendbuf, void* recvbuf, uint64_t count,
                               gw_dtype datatype, gw_op op, MPI_Comm comm,
                               const gw_mpi_options* options, gw_operation** operation);
/* The operation is not started. It keeps its residuals from start to start. */
GW_API gw_status gw_allreduce_init(const void* sendbuf, void* recvbuf, uint64_t count,
                                   gw_dtype datatype, gw_op op, MPI_Comm comm,
                                   const gw_mpi_options* options, gw_operation** operation);
GW_API gw_status gw_reduce_scatter_init(const void* sendbuf, void* recvbuf, uint64_t recvcount,
                                        gw_dtype datatype, gw_op op, MPI_Comm comm,
                                        const gw_mpi_options* options, gw_operation** operation);
GW_API gw_status gw_allgather_init(const void* sendbuf, void* recvbuf, uint64_t sendcount,
                                   gw_dtype datatype, MPI_Comm comm, const gw_mpi_options* options,
                                   gw_operation** operation);

/* Starts the operation and reads sendbuf. GW_UNEXPECTED_MESSAGE: it is under way. */
GW_API gw_status gw_start(gw_operation* operation);
/* Moves the bytes that can be moved without waiting. *done: whether the operation is done. */
GW_API gw_status gw_test(gw_operation* operation, int* done);
GW_API gw_status gw_wait(gw_operation* operation);
/* Frees an operation, which must not be under way; otherwise the other ranks find this rank
   silent. */
GW_API void gw_operation_free(gw_operation* operation);

/* Bytes of all messages to and from this rank since the operation was made. */
GW_API gw_status gw_operation_traffic(const gw_operation* operation, uint64_t* bytes_sent,
                                      uint64_t* bytes_received);

#ifdef __cplusplus
}
#endif

#endif
