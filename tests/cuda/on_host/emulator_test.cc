// The emulator finds faults with which a GPU may hang or give wrong results.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "gtest/gtest.h"

#include "cuda/coded/chunk_places.cuh"
#include "cuda/common/launch.h"

namespace gradwire::cuda {
namespace {

class EmulatorDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

void run(uint64_t blocks, const std::function<void()>& body) {
  on_host::launch(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), body);
}

// Each block waits for the blocks before it, which run at the same time.
TEST(Emulator, BlocksFindTheirPlacesTogether) {
  constexpr uint32_t kBlocks = 100;
  const uint64_t waits = on_host::waits();
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    on_host::set_seed(seed);
    std::vector<uint64_t> ends(kBlocks);
    std::vector<uint64_t> begins(kBlocks);
    std::vector<uint32_t> begun;  // blockIdx, in the order of the tickets
    uint32_t ticket = 0;
    run(kBlocks, [&] {
      const uint32_t own = take_ticket(&ticket);
      if (threadIdx.x == 0) begun.push_back(blockIdx.x);
      const uint64_t begin = place_chunk(&ends[own], own, own + 1);
      if (threadIdx.x == kThreads - 1) begins[own] = begin;
    });
    for (uint64_t i = 0; i < kBlocks; ++i) EXPECT_EQ(begins[i], i * (i + 1) / 2);
    EXPECT_FALSE(std::is_sorted(begun.begin(), begun.end()));
  }
#ifdef GRADWIRE_ADDRESS_SANITIZER
  EXPECT_EQ(on_host::waits(), waits);  // blocks run one at a time
#else
  EXPECT_GT(on_host::waits(), waits);
#endif
}

TEST(Launch, RefusesMoreBlocksThanAGridHas) {
  const auto status = launch(
      +[] {}, uint64_t{1} << 31, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kDeviceError);
}

TEST_F(EmulatorDeathTest, ABlockWaitsForOneThatHasNotBegun) {
  std::vector<uint64_t> ends(100);
  EXPECT_DEATH(run(100, [&] { place_chunk(&ends[blockIdx.x], blockIdx.x, 1); }),
               "wait for one that has not begun");
}

#ifndef GRADWIRE_ADDRESS_SANITIZER
TEST(Emulator, SharedMemoryHoldsAnything) {
  uint32_t zeros = 0;
  run(2, [&] {
    __shared__ uint32_t unset[kThreads];
    if (unset[threadIdx.x] == 0) ++zeros;
    unset[threadIdx.x] = 0;
  });
  EXPECT_EQ(zeros, 0u);
}
#endif

TEST_F(EmulatorDeathTest, ALaneHasLeft) {
  const auto leave = [] {
    if (threadIdx.x != 7) __ballot_sync(kAllLanes, 1);
  };
  EXPECT_DEATH(run(1, leave), "others have left");
}

TEST_F(EmulatorDeathTest, LanesAreAtDifferentOperations) {
  const auto differ = [] {
    if (lane() < 16) {
      __ballot_sync(kAllLanes, 1);
    } else {
      __syncwarp();
    }
  };
  EXPECT_DEATH(run(1, differ), "different warp operations");
}

TEST_F(EmulatorDeathTest, ThreadsAreAtDifferentBarriers) {
  const auto differ = [] {
    if (warp() == 0) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  };
  EXPECT_DEATH(run(1, differ), "different barriers");
}

// Shared memory is used twice without a barrier between; some order of the threads must show this.
TEST(Emulator, AMissingBarrierShows) {
  bool shows = false;
  for (int turn = 0; turn < 20 && !shows; ++turn) {
    run(1, [&] {
      __shared__ uint32_t of_warp[kWarps];
      for (uint32_t round = 0; round < 2; ++round) {
        if (lane() == 0) of_warp[warp()] = round;
        __syncthreads();
        for (const uint32_t value : of_warp) shows = shows || value != round;
        __syncwarp();
      }
    });
  }
  EXPECT_TRUE(shows);
}

}  // namespace
}  // namespace gradwire::cuda
