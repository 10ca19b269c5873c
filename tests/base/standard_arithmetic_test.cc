#include "base/standard_arithmetic.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "gtest/gtest.h"

#include "base/thread_pool.h"
#include "tests/arithmetic_modes.h"

namespace gradwire {
namespace {

constexpr float kLeastNormal = std::numeric_limits<float>::min();

// Whether 1 + 2^-24 and 1 - 2^-25, ties, are rounded to even, and denormals are kept.
bool is_standard() {
  volatile float one = 1.0f;
  volatile float least = kLeastNormal;
  volatile float half = 0.5f;
  volatile float denormal = least * half;
  const bool nearest = one + 0x1p-24f == 1.0f && one + 0x1.8p-23f == 1.0f + 0x1p-22f &&
                       -one - 0x1p-24f == -1.0f && one - 0x1p-25f == 1.0f;
  return nearest && denormal != 0 && denormal / half == least;
}

TEST(StandardArithmetic, HoldsAsLongAsItLives) {
  ASSERT_TRUE(is_standard());
  for (const ArithmeticMode::Mode mode : ArithmeticMode::all()) {
    const ArithmeticMode set(mode);
    const uint64_t before = ArithmeticMode::settings();
    bool differed = !is_standard();
    bool held = false;
    {
      const StandardArithmetic arithmetic;
      held = is_standard();
      volatile float zero = 0.0f;
      volatile float trap = zero / zero;
      held = held && std::isnan(trap);
      const StandardArithmetic again;
    }
    EXPECT_TRUE(held) << ArithmeticMode::name(mode);
    EXPECT_EQ(differed, mode != ArithmeticMode::Mode::kTraps) << ArithmeticMode::name(mode);
    EXPECT_EQ(ArithmeticMode::settings(), before) << ArithmeticMode::name(mode);
  }
  EXPECT_TRUE(is_standard());
}

// Threads begin with the settings of the thread that starts them.
TEST(StandardArithmetic, HoldsInThePoolsThreads) {
  for (const ArithmeticMode::Mode mode : ArithmeticMode::all()) {
    const ArithmeticMode set(mode);
    ThreadPool pool(2);
    std::atomic<int> inside{0};
    std::atomic<int> standard{0};
    pool.for_each(2, [&](size_t) {
      ++inside;
      while (inside < 2) std::this_thread::yield();  // so that each thread has an index
      if (is_standard()) ++standard;
    });
    const int callers = mode == ArithmeticMode::Mode::kTraps ? 1 : 0;
    EXPECT_EQ(standard, 1 + callers) << ArithmeticMode::name(mode);
  }
}

}  // namespace
}  // namespace gradwire
