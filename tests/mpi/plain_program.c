/* A program without gradwire. It sums large and small buffers of floats, in place and not, and
   makes calls that must not be compressed. Exit status 0: every sum has an error of at most 1 %. */

#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGE = 100000, SMALL = 10 };

static int size;

static int wrong(const char* what, float got, float expected) {
  if (fabsf(got - expected) <= 0.01f * expected) return 0;
  fprintf(stderr, "%s: got %g, not %g\n", what, got, expected);
  return 1;
}

int main(int argc, char** argv) {
  static float in[LARGE], out[LARGE];
  double twice[2] = {1, 2};
  float largest = 3;
  int failed = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int i = 0; i < LARGE; ++i) in[i] = 1.003f;
  MPI_Allreduce(in, out, LARGE, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  failed |= wrong("large", out[LARGE - 1], 1.003f * (float)size);
  /* The last bits show whether bf16 compressed it. */
  printf("%s\n", out[0] == 1.003f * (float)size ? "exact" : "rounded");
  MPI_Allreduce(MPI_IN_PLACE, in, LARGE, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  failed |= wrong("in place", in[7], 1.003f * (float)size);
  MPI_Allreduce(in, out, SMALL, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  failed |= wrong("small", out[1], in[1] * (float)size);
  MPI_Allreduce(MPI_IN_PLACE, twice, 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  failed |= wrong("double", (float)twice[1], 2 * (float)size);
  MPI_Allreduce(MPI_IN_PLACE, &largest, 1, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
  failed |= wrong("max", largest, 3);
  if (argc > 1 && strcmp(argv[1], "nan") == 0) {
    for (int i = 0; i < LARGE; ++i) in[i] = 1.5f;
    in[5] = nanf("");
    MPI_Allreduce(MPI_IN_PLACE, in, LARGE, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    failed |= !isnan(in[5]);
    failed |= wrong("beside a NaN", in[6], 1.5f * (float)size);
  }
  if (argc > 1 && strcmp(argv[1], "beyond-fp16") == 0) {
    for (int i = 0; i < LARGE; ++i) in[i] = 1.5f;
    in[5] = in[LARGE - 1] = 7e4f;
    MPI_Allreduce(MPI_IN_PLACE, in, LARGE, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    failed |= wrong("7e4, first", in[5], 7e4f * (float)size);
    failed |= wrong("7e4, last", in[LARGE - 1], 7e4f * (float)size);
  }
  MPI_Finalize();
  return failed;
}
