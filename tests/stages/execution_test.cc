#include "gradwire/execution.h"

#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include "gtest/gtest.h"

namespace gradwire {
namespace {

// The number of threads that ran `count` calls. Each call waits for `wanted` threads, but not for
// ever.
size_t threads_of(Execution& execution, size_t count, size_t wanted) {
  std::mutex mutex;
  std::set<std::thread::id> seen;
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  execution.for_each(count, [&](size_t) {
    while (std::chrono::steady_clock::now() < give_up) {
      {
        const std::lock_guard lock(mutex);
        seen.insert(std::this_thread::get_id());
        if (seen.size() >= wanted) return;
      }
      std::this_thread::yield();
    }
  });
  return seen.size();
}

TEST(Execution, WakesThreadsWhereItPays) {
  Execution execution = Execution::create("auto", 2).value();
  EXPECT_EQ(threads_of(execution, 31, 1), 1u);
  EXPECT_EQ(threads_of(execution, 32, 2), 2u);
}

TEST(Execution, WakesThreadsAlwaysIfAskedTo) {
  Execution execution = Execution::create("auto", 2, Threading::kAlways).value();
  EXPECT_EQ(threads_of(execution, 2, 2), 2u);
}

}  // namespace
}  // namespace gradwire
