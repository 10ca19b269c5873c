/* gradwire_mpi.h in C99, on at least 2 ranks. Exit status 0: all checks passed. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/resource.h>

#include "gradwire/gradwire_mpi.h"

enum { N = 3000 };

static int rank, size;

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      fprintf(stderr, "rank %d: %s:%d: %s (%s)\n", rank, __FILE__, __LINE__, #condition, \
              gw_last_error_message());                                                  \
      MPI_Abort(MPI_COMM_WORLD, 1);                                                      \
    }                                                                                    \
  } while (0)

static void fill(float* values, int count) {
  for (int i = 0; i < count; ++i) values[i] = (float)(i % 17 + rank);
}

/* The sum of fill()'s values over all ranks. */
static float sum_at(int i) { return (float)(size * (i % 17) + size * (size - 1) / 2); }

/* Whether values[i] is the sum at first + i, but for what bf16 rounds on the way. */
static int is_near(const float* values, int first, int n) {
  for (int i = 0; i < n; ++i) {
    const float error = values[i] - sum_at(first + i);
    const float bound = 0.02f * sum_at(first + i);
    if (error > bound || error < -bound) return 0;
  }
  return 1;
}

static void test_blocking(void) {
  static float in[N], out[N];
  gw_mpi_options options;
  gw_mpi_options_init(&options);
  options.codec = "raw";
  for (int ring = 0; ring < 2; ++ring) {
    options.exchange = ring ? "ring" : "sharded";
    fill(in, N);
    CHECK(gw_allreduce(in, out, N, GW_F32, GW_SUM, MPI_COMM_WORLD, &options) == GW_OK);
    for (int i = 0; i < N; ++i) CHECK(out[i] == sum_at(i));
    CHECK(gw_allreduce(MPI_IN_PLACE, in, N, GW_F32, GW_AVERAGE, MPI_COMM_WORLD, &options) == GW_OK);
    for (int i = 0; i < N; ++i) CHECK(in[i] == out[i] / (float)size);
  }
}

/* Without a residual no later call brings what a codec leaves out, so the default keeps it. */
static void test_blocking_without_a_codec(void) {
  static float in[N], out[N], all[N];
  gw_mpi_options options;
  gw_operation* operation = NULL;
  gw_mpi_options_init(&options);
  for (size_t i = 0; i <= gw_exchange_count(); ++i) {
    const gw_mpi_options* given = i < gw_exchange_count() ? &options : NULL;
    if (given != NULL) options.exchange = gw_exchange_info_at(i)->name;
    fill(in, N);
    CHECK(gw_allreduce(in, out, N, GW_F32, GW_SUM, MPI_COMM_WORLD, given) == GW_OK);
    CHECK(is_near(out, 0, N));
    CHECK(gw_iallreduce(in, out, N, GW_F32, GW_SUM, MPI_COMM_WORLD, given, &operation) == GW_OK);
    CHECK(gw_wait(operation) == GW_OK);
    CHECK(is_near(out, 0, N));
    gw_operation_free(operation);
    const int block = N / size;
    CHECK(gw_reduce_scatter(in, out, (uint64_t)block, GW_F32, GW_SUM, MPI_COMM_WORLD, given) ==
          GW_OK);
    CHECK(is_near(out, rank * block, block));
    CHECK(gw_allgather(out, all, (uint64_t)block, GW_F32, MPI_COMM_WORLD, given) == GW_OK);
    CHECK(is_near(all, 0, block * size));
  }
}

static void test_blocks(void) {
  const int all = N * size;
  float* in = malloc(sizeof(float) * (size_t)all);
  float* out = malloc(sizeof(float) * (size_t)all);
  gw_mpi_options options;
  gw_mpi_options_init(&options);
  options.codec = "raw";
  fill(in, all);
  CHECK(gw_reduce_scatter(in, out, N, GW_F32, GW_SUM, MPI_COMM_WORLD, &options) == GW_OK);
  for (int i = 0; i < N; ++i) CHECK(out[i] == sum_at(rank * N + i));
  CHECK(gw_allgather(out, in, N, GW_F32, MPI_COMM_WORLD, &options) == GW_OK);
  for (int i = 0; i < all; ++i) CHECK(in[i] == sum_at(i));

  gw_operation* operation = NULL;
  fill(in, all);
  CHECK(gw_reduce_scatter_init(in, out, N, GW_F32, GW_SUM, MPI_COMM_WORLD, &options, &operation) ==
        GW_OK);
  CHECK(gw_start(operation) == GW_OK);
  CHECK(gw_wait(operation) == GW_OK);
  for (int i = 0; i < N; ++i) CHECK(out[i] == sum_at(rank * N + i));
  gw_operation_free(operation);
  CHECK(gw_allgather_init(out, in, N, GW_F32, MPI_COMM_WORLD, &options, &operation) == GW_OK);
  CHECK(gw_start(operation) == GW_OK);
  CHECK(gw_wait(operation) == GW_OK);
  for (int i = 0; i < all; ++i) CHECK(in[i] == sum_at(i));
  gw_operation_free(operation);
  free(in);
  free(out);
}

static void test_operations(void) {
  static float in[N], out[N];
  double total = 0;
  uint64_t sent = 0, received = 0;
  gw_operation* operation = NULL;
  gw_mpi_options options;
  const uint64_t dims[2] = {30, N / 30};
  const gw_tensor tensor = {"weight", dims, 2};
  const gw_rule rule = {"w*", "3lc:s=1.5", GW_PUSH_AND_PULL};
  gw_mpi_options_init(&options);
  options.codec = "raw";
  fill(in, N);
  CHECK(gw_iallreduce(in, out, N, GW_F32, GW_SUM, MPI_COMM_WORLD, &options, &operation) == GW_OK);
  for (int done = 0; !done;) CHECK(gw_test(operation, &done) == GW_OK);
  for (int i = 0; i < N; ++i) CHECK(out[i] == sum_at(i));
  gw_operation_free(operation);

  /* With error feedback, later steps send what earlier steps left out. */
  options.tensors = &tensor;
  options.tensor_count = 1;
  options.rules = &rule;
  options.rule_count = 1;
  CHECK(gw_allreduce_init(in, out, N, GW_F32, GW_AVERAGE, MPI_COMM_WORLD, &options, &operation) ==
        GW_OK);
  for (int step = 0; step < 100; ++step) {
    CHECK(gw_start(operation) == GW_OK);
    CHECK(gw_start(operation) == GW_UNEXPECTED_MESSAGE);
    CHECK(gw_wait(operation) == GW_OK);
    total += out[5];
  }
  CHECK(total / 100 > sum_at(5) / size - 0.5 && total / 100 < sum_at(5) / size + 0.5);
  CHECK(gw_operation_traffic(operation, &sent, &received) == GW_OK);
  CHECK(sent > 0 && sent < 100 * sizeof in / 2 && received > 0);
  gw_operation_free(operation);
}

static void test_errors(void) {
  static float values[N];
  gw_mpi_options options;
  gw_status status;
  gw_mpi_options_init(&options);
  options.codec = rank == size - 1 ? "fp16" : "bf16";
  status = gw_allreduce(MPI_IN_PLACE, values, N, GW_F32, GW_SUM, MPI_COMM_WORLD, &options);
  CHECK(status == GW_PEER_MISMATCH && strstr(gw_last_error_message(), "push fp16") != NULL);
  CHECK(strcmp(gw_strerror(GW_PEER_LOST), "peer_lost") == 0);

  options.codec = "raw";
  options.exchange = rank == 0 ? "star" : "ring";
  status = gw_allreduce(MPI_IN_PLACE, values, N, GW_F32, GW_SUM, MPI_COMM_WORLD, &options);
  CHECK(status == (rank == 0 ? GW_INVALID_ARGUMENT : GW_PEER_MISMATCH));
  CHECK(strstr(gw_last_error_message(), "'star' is no exchange") != NULL);

  options.exchange = "ring";
  CHECK(gw_allreduce(MPI_IN_PLACE, values, N, 9, GW_SUM, MPI_COMM_WORLD, &options) ==
        GW_UNSUPPORTED_DTYPE);
  CHECK(gw_allreduce(MPI_IN_PLACE, values, N, GW_F32, 9, MPI_COMM_WORLD, &options) ==
        GW_INVALID_ARGUMENT);
  CHECK(gw_wait(NULL) == GW_INVALID_ARGUMENT);
  {
    const uint64_t dims[1] = {N / 2};
    const gw_tensor twice[2] = {{"w", dims, 1}, {"w", dims, 1}};
    options.tensors = twice;
    options.tensor_count = 2;
    CHECK(gw_allreduce(MPI_IN_PLACE, values, N, GW_F32, GW_SUM, MPI_COMM_WORLD, &options) ==
          GW_INVALID_ARGUMENT);
    CHECK(strstr(gw_last_error_message(), "two tensors have the name 'w'") != NULL);
    options.tensor_count = 0;
  }
  CHECK(gw_allreduce(MPI_IN_PLACE, values, N, GW_F32, GW_SUM, MPI_COMM_WORLD, &options) == GW_OK);

  /* The ranks stay in step after a call that one rank refuses. */
  status = gw_allreduce(MPI_IN_PLACE, values, N, GW_F32, rank == 0 ? (gw_op)9 : GW_SUM,
                        MPI_COMM_WORLD, &options);
  CHECK(status == (rank == 0 ? GW_INVALID_ARGUMENT : GW_PEER_MISMATCH));
  CHECK(gw_allreduce(MPI_IN_PLACE, values, N, GW_F32, GW_SUM, MPI_COMM_WORLD, &options) == GW_OK);
}

/* The ranks stay in step after a call for which one rank has no memory. Sanitizers would end a
   program that asks for 1 TiB. */
static void test_memory(void) {
#ifndef TEST_SANITIZED
  static float values[N];
  struct rlimit limit;
  gw_mpi_options options;
  gw_status status;
  CHECK(getrlimit(RLIMIT_AS, &limit) == 0);
  if (limit.rlim_cur > (rlim_t)1 << 39) limit.rlim_cur = (rlim_t)1 << 39;
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
  gw_mpi_options_init(&options);
  status = gw_allreduce(MPI_IN_PLACE, values, rank == 0 ? (uint64_t)1 << 38 : N, GW_BF16, GW_SUM,
                        MPI_COMM_WORLD, &options);
  CHECK(status == (rank == 0 ? GW_OUT_OF_MEMORY : GW_PEER_MISMATCH));
  CHECK(strstr(gw_last_error_message(), "out of memory") != NULL);
  CHECK(gw_allreduce(MPI_IN_PLACE, values, N, GW_F32, GW_SUM, MPI_COMM_WORLD, &options) == GW_OK);
#endif
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  test_blocking();
  test_blocking_without_a_codec();
  test_blocks();
  test_operations();
  test_errors();
  test_memory();
  MPI_Finalize();
  return 0;
}
