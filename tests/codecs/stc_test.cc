// The properties of stc beyond those of every codec.

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/codecs/inputs.h"

namespace gradwire {
namespace {

TEST(Stc, SendsTheLargestWithTheirMeanMagnitude) {
  const auto x = gaussian(100'000, 9);
  for (const char* coder : {"rice", "zre", "none"}) {
    const auto sent =
        decoded_by(*Codec::parse(std::string("stc:density=0.02,coder=") + coder).value(), x);
    std::set<float> magnitudes;
    double sum = 0;
    uint64_t count = 0;
    float least_sent = INFINITY;
    float largest_kept = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      if (sent[i] == 0.0f) {
        largest_kept = std::max(largest_kept, std::abs(x[i]));
        continue;
      }
      ASSERT_EQ(std::signbit(sent[i]), std::signbit(x[i]));
      magnitudes.insert(std::abs(sent[i]));
      least_sent = std::min(least_sent, std::abs(x[i]));
      sum += std::abs(x[i]);
      ++count;
    }
    ASSERT_EQ(magnitudes.size(), 1u);
    EXPECT_FLOAT_EQ(*magnitudes.begin(), static_cast<float>(sum / static_cast<double>(count)));
    EXPECT_NEAR(static_cast<double>(count), 2000.0, 5 * 100'000 * std::sqrt(0.02 * 0.98 / 4096.0));
    EXPECT_GT(least_sent, largest_kept);
  }
}

// Positions as numbers would take 16 to 17 bits for each value sent.
TEST(Stc, TakesAFewBitsAValueSent) {
  const auto x = gaussian(1'000'000, 9);
  const Sent sent(*Codec::parse("stc").value(), x);
  EXPECT_LT(8.0 * static_cast<double>(sent.payload.size()), 0.10 * 1'000'000);
}

}  // namespace
}  // namespace gradwire
