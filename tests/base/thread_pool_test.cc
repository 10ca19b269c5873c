#include "base/thread_pool.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace gradwire {
namespace {

TEST(ThreadPool, CallsEveryIndexOnce) {
  for (int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    for (size_t count : {0u, 1u, 2u, 7u, 1000u}) {
      std::vector<std::atomic<int>> calls(count);
      pool.for_each(count, [&](size_t i) { ++calls[i]; });
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(calls[i], 1) << threads << " " << count;
    }
  }
}

TEST(ThreadPool, UsesItsThreads) {
  ThreadPool pool(2);
  // Unless both indices run at once, this never ends.
  std::atomic<int> inside{0};
  pool.for_each(2, [&](size_t) {
    ++inside;
    while (inside < 2) std::this_thread::yield();
  });
  EXPECT_EQ(inside, 2);
}

TEST(ThreadPool, ServesManyCallsInARow) {
  ThreadPool pool(4);
  std::atomic<size_t> sum{0};
  for (size_t call = 0; call < 2000; ++call) pool.for_each(5, [&](size_t i) { sum += i; });
  EXPECT_EQ(sum, 2000u * 10u);
}

}  // namespace
}  // namespace gradwire
