/* Averages a gradient over all MPI ranks, compressed, with error feedback from step to step.
 *
 *   mpicc -std=c99 average.c $(pkg-config --cflags --libs gradwire_mpi) -o average
 *   mpirun -n 2 ./average
 */
#include <mpi.h>
#include <stdio.h>

#include <gradwire/gradwire_mpi.h>

enum { kRows = 256, kColumns = 100, kValues = kRows * kColumns, kSteps = 20 };

static float gradient[kValues];

static void require(gw_status status) {
  if (status == GW_OK) return;
  fprintf(stderr, "gradwire: %s: %s\n", gw_strerror(status), gw_last_error_message());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);

  gw_mpi_options options;
  gw_mpi_options_init(&options);
  options.codec = "3lc:s=1.00,coder=rice";
  gw_operation* average = NULL; /* keeps the residuals */
  require(gw_allreduce_init(MPI_IN_PLACE, gradient, kValues, GW_F32, GW_AVERAGE, MPI_COMM_WORLD,
                            &options, &average));

  const int small = kValues / 4; /* a value that the codec does not send in each step */
  double sum = 0;
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kValues; ++i) gradient[i] = (float)((rank + 1) * i) / kValues;
    require(gw_start(average)); /* compute something else between start and wait */
    require(gw_wait(average));
    sum += gradient[small];
  }

  uint64_t sent = 0, received = 0;
  require(gw_operation_traffic(average, &sent, &received));
  gw_operation_free(average);
  if (rank == 0) {
    printf("a quarter of the largest value: %.3f in the mean of %d steps, exactly %.3f\n",
           sum / kSteps, kSteps, (ranks + 1) / 8.0);
    printf("rank 0 sent %d bytes a step, %d without compression\n", (int)sent / kSteps,
           (int)(2 * sizeof(gradient) / (size_t)ranks) * (ranks - 1));
  }
  MPI_Finalize();
  return 0;
}
