/* A program without gradwire. It sums large and small buffers of floats, in place and not, and
   makes calls that must not be compressed. Exit status 0: every sum has an error of at most 1 %. */

#include <dlfcn.h>
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/resource.h>

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
  if (argc > 2 && strcmp(argv[1], "device") == 0) { /* argv[2]: the stand-in of CUDA's driver */
    void* driver = dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL);
    void* (*allocate)(size_t, int) = (void* (*)(size_t, int))dlsym(driver, "fake_cuda_allocate");
    float* (*values)(void*) = (float* (*)(void*))dlsym(driver, "fake_cuda_values");
    float* from = allocate(sizeof in, 0);
    float* to = allocate(sizeof in, 0);
    for (int i = 0; i < LARGE; ++i) values(from)[i] = 1.5f;
    MPI_Allreduce(from, to, LARGE, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    failed |= wrong("on a device", values(to)[LARGE - 1], 1.5f * (float)size);
    failed |= wrong("the input on a device", values(from)[0], 1.5f);
    MPI_Allreduce(MPI_IN_PLACE, to, LARGE, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    failed |= wrong("in place on a device", values(to)[0], 1.5f * (float)(size * size));
    values(from)[5] = 7e4f; /* fp16 makes it infinite */
    MPI_Allreduce(from, to, LARGE, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    failed |= wrong("7e4 on a device", values(to)[5], 7e4f * (float)size);
  }
  if (argc > 1 && strcmp(argv[1], "no-memory") == 0) {
    static float huge[1 << 24]; /* in place, the library needs a copy */
    struct rlimit limit;
    getrlimit(RLIMIT_AS, &limit);
    const struct rlimit none = {0, limit.rlim_max};
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    setrlimit(RLIMIT_AS, &none);
    failed |= MPI_Allreduce(MPI_IN_PLACE, huge, 1 << 24, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD) !=
              MPI_ERR_OTHER;
    setrlimit(RLIMIT_AS, &limit);
  }
  MPI_Finalize();
  return failed;
}
