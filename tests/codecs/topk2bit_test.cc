// The properties of topk2bit beyond those of every codec.

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/codecs/inputs.h"

namespace gradwire {
namespace {

constexpr size_t kGroup = 4096;

TEST(Topk2bit, SendsTheLargestOfEachGroup) {
  auto x = gaussian(10 * kGroup + 1000, 9);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= static_cast<float>(1 + i / kGroup);
  const auto sent = decoded_by(*Codec::parse("topk2bit:density=0.02").value(), x);
  for (size_t first = 0; first < x.size(); first += kGroup) {
    const size_t end = std::min(first + kGroup, x.size());
    size_t count = 0;
    float least_sent = INFINITY;
    float largest_kept = 0;
    for (size_t i = first; i < end; ++i) {
      if (sent[i] == 0.0f) {
        largest_kept = std::max(largest_kept, std::abs(x[i]));
      } else {
        ASSERT_EQ(std::signbit(sent[i]), std::signbit(x[i]));
        least_sent = std::min(least_sent, std::abs(x[i]));
        ++count;
      }
    }
    EXPECT_EQ(count, end - first == kGroup ? 82u : 20u);
    EXPECT_GT(least_sent, largest_kept);
  }
}

TEST(Topk2bit, HasTheMeansOfSmallAndLargeMagnitudes) {
  const auto x = gaussian(10 * kGroup, 3);
  const auto sent = decoded_by(*Codec::parse("topk2bit").value(), x);
  std::vector<float> magnitudes;
  std::set<float> decoded;
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (sent[i] == 0.0f) continue;
    magnitudes.push_back(std::abs(x[i]));
    decoded.insert(std::abs(sent[i]));
    sum += std::abs(x[i]);
  }
  const double mean = sum / static_cast<double>(magnitudes.size());
  double sums[2] = {};
  double counts[2] = {};
  for (float magnitude : magnitudes) {
    sums[magnitude > mean ? 1 : 0] += magnitude;
    counts[magnitude > mean ? 1 : 0] += 1;
  }
  ASSERT_EQ(decoded.size(), 2u);
  EXPECT_FLOAT_EQ(*decoded.begin(), static_cast<float>(sums[0] / counts[0]));
  EXPECT_FLOAT_EQ(*decoded.rbegin(), static_cast<float>(sums[1] / counts[1]));
}

TEST(Topk2bit, TakesTheFirstOfEqualMagnitudes) {
  const std::vector<float> x = {0.0f, -1.0f, 1.0f, -1.0f, 1.0f, 0.0f};
  const auto sent = decoded_by(*Codec::parse("topk2bit:density=0.5").value(), x);
  EXPECT_EQ(sent, (std::vector<float>{0.0f, -1.0f, 1.0f, -1.0f, 0.0f, 0.0f}));
}

TEST(Topk2bit, SendsNoZeros) {
  std::vector<float> x(kGroup);
  x[7] = 3.0f;
  x[9] = -1.0f;
  EXPECT_EQ(decoded_by(*Codec::parse("topk2bit:density=0.9").value(), x), x);
}

// 12 bits name a place among 4096, and 2 bits a value.
TEST(Topk2bit, TakesFewerBitsAValueSentThanPlacesAsNumbers) {
  const auto x = gaussian(1'000'000, 9);
  for (const double density : {0.01, 0.02, 0.03}) {
    const Sent sent(*Codec::parse("topk2bit:density=" + std::to_string(density)).value(), x);
    const double bits = 8.0 * static_cast<double>(sent.payload.size()) / (density * 1'000'000);
    EXPECT_LT(bits, 2 + 0.75 * 12) << density;
    EXPECT_GT(bits, 2 + std::log2(1 / density)) << density;  // about the entropy of the places
  }
}

}  // namespace
}  // namespace gradwire
