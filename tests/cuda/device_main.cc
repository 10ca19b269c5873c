#include <cuda_runtime.h>

#include <cstdio>

#include "gtest/gtest.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int devices = 0;
  if (!testing::GTEST_FLAG(list_tests) &&
      (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)) {
    std::puts("cuda_test: there is no GPU here; nothing was tested");
    return 77;
  }
  return RUN_ALL_TESTS();
}
