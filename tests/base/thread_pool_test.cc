#include "base/thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include <sys/wait.h>

#include "tests/sanitizers.h"

namespace gradwire {
namespace {

// Unless two threads run the two indices at once, this never ends.
void meet(ThreadPool& pool) {
  std::atomic<int> inside{0};
  pool.for_each(2, [&](size_t) {
    ++inside;
    while (inside < 2) std::this_thread::yield();
  });
}

// Runs `work` in a forked child; whether it came to its end within 20 s.
template <typename Work>
bool ends_in_child(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    _exit(0);
  }
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > give_up) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(ThreadPool, ThrowsWhatABodyThrows) {
  for (int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 20; ++round) {
      std::atomic<int> calls{0};
      const auto body = [&](size_t i) {
        ++calls;
        if (i % 3 == 2) throw std::bad_alloc();
      };
      EXPECT_THROW(pool.for_each(1'000'000, body), std::bad_alloc);
      EXPECT_LT(calls, 1'000'000);
      pool.for_each(3, [&](size_t) { calls = 0; });
      EXPECT_EQ(calls, 0);
    }
  }
}

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
  meet(pool);
}

TEST(ThreadPool, StartsThreadsOfItsOwnInAForkedChild) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer allows no threads after a fork";
  ThreadPool pool(2);
  meet(pool);
  EXPECT_TRUE(ends_in_child([&] { meet(pool); }));
  EXPECT_TRUE(ends_in_child([&] {
    meet(pool);
    if (!ends_in_child([&] { meet(pool); })) _exit(1);
  }));
  meet(pool);
}

TEST(ThreadPool, IsDestroyedInAForkedChild) {
  std::optional<ThreadPool> pool(2);
  EXPECT_TRUE(ends_in_child([&] { pool.reset(); }));
  meet(*pool);
}

// The child must not wait for a lock that a thread of the parent held at the fork.
TEST(ThreadPool, IsUsedInAChildThatIsForkedWhileTheThreadsWork) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer allows no threads after a fork";
  ThreadPool pool(2);
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    while (!stop) pool.for_each(2, [](size_t) {});
  });
  bool ended = true;
  for (int i = 0; i < 50 && ended; ++i) ended = ends_in_child([&] { meet(pool); });
  stop = true;
  caller.join();
  EXPECT_TRUE(ended);
}

TEST(ThreadPool, ServesManyCallsInARow) {
  ThreadPool pool(4);
  std::atomic<size_t> sum{0};
  for (size_t call = 0; call < 2000; ++call) pool.for_each(5, [&](size_t i) { sum += i; });
  EXPECT_EQ(sum, 2000u * 10u);
}

}  // namespace
}  // namespace gradwire
