/*
 * gradwire's compressed collectives over MPI in C (C99). Errors, strings and handles as in
 * gradwire.h; library gradwire_mpi.
 *
 * What a communicator is used for, what threads may do, and what holds of residuals: as
 * gradwire/mpi.h says. In short: the first call on a communicator duplicates it and is collective;
 * threads work at the same time on communicators of their own with MPI_THREAD_MULTIPLE; only
 * persistent operations have error feedback.
 *
 * In all calls sendbuf may be MPI_IN_PLACE: input and output are recvbuf then. Results have the
 * same bits on every rank.
 *
 *   GW_PEER_MISMATCH  the ranks don't want the same, or one can't take part; on every rank, naming
 *                     two ranks and the difference
 *   GW_PEER_LOST      a rank was silent for the timeout; the message names it
 *   GW_NON_FINITE     on every rank: some rank's values were NaN or Inf; the message names it, and
 *                     the results are NaN. A persistent operation can be started again.
 *   GW_UNKNOWN_CODEC, GW_BAD_PARAMETER, GW_UNSUPPORTED_DTYPE, GW_LENGTH_MISMATCH,
 *   GW_LIMIT_EXCEEDED, GW_INVALID_ARGUMENT  (others can't go on then: they get GW_PEER_MISMATCH)
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
  const char* codec;      /* "3lc" */
  const char* pull_codec; /* NULL: as codec */
  const char* exchange;   /* of gw_allreduce: "sharded"; or "ring", "terngrad", "hierarchical" or
                             "hierarchical:between=ring,ranks=4" (between the machines: sharded;
                             ranks per machine: as MPI says) */
  uint64_t seed;          /* of stochastic codecs: 0 */
  int threads;            /* 1 */
  double timeout_seconds; /* 60 */
  /* What an all-reduced buffer holds, one tensor after the other; none: one tensor, all of which
     takes the codec. Otherwise small ones go raw as in gw_layout_options. */
  const gw_tensor* tensors;
  size_t tensor_count;
  const gw_rule* rules;
  size_t rule_count;
  const char* const* exclude;
  size_t exclude_count;
  uint64_t min_numel; /* 256 */
} gw_mpi_options;

/* Sets the defaults; set what differs after it. Functions that take options take NULL for them. */
GW_API void gw_mpi_options_init(gw_mpi_options* options);

/* ---- blocking ------------------------------------------------------------------------------ */

/* Sum or average of count values over all ranks. */
GW_API gw_status gw_allreduce(const void* sendbuf, void* recvbuf, uint64_t count, gw_dtype datatype,
                              gw_op op, MPI_Comm comm, const gw_mpi_options* options);
/* Rank r gets block r of the result; recvcount values a block, sendbuf one for each rank. In place
   the result is the first block of recvbuf. */
GW_API gw_status gw_reduce_scatter(const void* sendbuf, void* recvbuf, uint64_t recvcount,
                                   gw_dtype datatype, gw_op op, MPI_Comm comm,
                                   const gw_mpi_options* options);
/* Every rank gets the blocks of all. In place the input is this rank's block of recvbuf. */
GW_API gw_status gw_allgather(const void* sendbuf, void* recvbuf, uint64_t sendcount,
                              gw_dtype datatype, MPI_Comm comm, const gw_mpi_options* options);

/* ---- non-blocking and persistent ----------------------------------------------------------- */

/* An operation on buffers that are bound to it. Nothing of it moves but in gw_test and gw_wait. */
typedef struct gw_operation gw_operation;

/* Started; to be waited for and freed. */
GW_API gw_status gw_iallreduce(const void* sendbuf, void* recvbuf, uint64_t count,
                               gw_dtype datatype, gw_op op, MPI_Comm comm,
                               const gw_mpi_options* options, gw_operation** operation);
/* Not started. Keeps its residuals from start to start. */
GW_API gw_status gw_allreduce_init(const void* sendbuf, void* recvbuf, uint64_t count,
                                   gw_dtype datatype, gw_op op, MPI_Comm comm,
                                   const gw_mpi_options* options, gw_operation** operation);
GW_API gw_status gw_reduce_scatter_init(const void* sendbuf, void* recvbuf, uint64_t recvcount,
                                        gw_dtype datatype, gw_op op, MPI_Comm comm,
                                        const gw_mpi_options* options, gw_operation** operation);
GW_API gw_status gw_allgather_init(const void* sendbuf, void* recvbuf, uint64_t sendcount,
                                   gw_dtype datatype, MPI_Comm comm, const gw_mpi_options* options,
                                   gw_operation** operation);

/* Reads sendbuf. GW_UNEXPECTED_MESSAGE: it is under way. */
GW_API gw_status gw_start(gw_operation* operation);
/* Moves what can be moved without waiting. *done: whether the operation is done. */
GW_API gw_status gw_test(gw_operation* operation, int* done);
GW_API gw_status gw_wait(gw_operation* operation);
/* Of an operation that isn't under way; otherwise the others find this rank silent. */
GW_API void gw_operation_free(gw_operation* operation);

/* Bytes of all messages to and from this rank since the operation was made. */
GW_API gw_status gw_operation_traffic(const gw_operation* operation, uint64_t* bytes_sent,
                                      uint64_t* bytes_received);

#ifdef __cplusplus
}
#endif

#endif
