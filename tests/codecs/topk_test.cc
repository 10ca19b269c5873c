// The properties of topk beyond those of every codec.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/codecs/inputs.h"

namespace gradwire {
namespace {

std::vector<float> send(const std::string& text, const std::vector<float>& x) {
  return decoded_by(*Codec::parse(text).value(), x);
}

int64_t count_sent(const std::vector<float>& values) {
  return std::count_if(values.begin(), values.end(), [](float value) { return value != 0.0f; });
}

TEST(Topk, SendsAboutTheRatioAndTheLargest) {
  const auto x = gaussian(300'000, 5);
  for (float ratio : {0.01f, 0.05f, 0.25f}) {
    const auto sent = send("topk:ratio=" + std::to_string(ratio), x);
    // Five standard deviations of a share that is estimated from 4096 values.
    const double spread = 5 * std::sqrt(ratio * (1 - ratio) / 4096.0);
    EXPECT_NEAR(static_cast<double>(count_sent(sent)) / 300'000.0, ratio, spread);
    float least_sent = INFINITY;
    float largest_kept = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      float& bound = sent[i] != 0.0f ? least_sent : largest_kept;
      bound = sent[i] != 0.0f ? std::min(bound, std::abs(x[i])) : std::max(bound, std::abs(x[i]));
      if (sent[i] != 0.0f) {
        ASSERT_EQ(sent[i], x[i]);
      }
    }
    EXPECT_GT(least_sent, largest_kept);
  }
}

TEST(Topk, IsExactWhereAllValuesAreSampled) {
  const auto x = gaussian(4000, 5);
  EXPECT_EQ(count_sent(send("topk:ratio=0.1", x)), 400);
}

TEST(Topk, EqualValuesAreSentWhole) {
  EXPECT_EQ(count_sent(send("topk", std::vector<float>(50'000, -2.0f))), 50'000);
}

TEST(Topk, SparseInputsAreSentWhole) {
  std::vector<float> x(100'000);
  for (size_t i = 0; i < x.size(); i += 1000) x[i] = 1e-40f;
  EXPECT_EQ(count_sent(send("topk", x)), 100);
}

TEST(Topk, ARatioOfOneSendsAllButZeros) {
  auto x = gaussian(100'000, 5);
  x[70'000] = 0.0f;
  x[70'001] = 1e-40f;
  EXPECT_EQ(send("topk:ratio=1,index=rice,ef=off", x), x);
}

}  // namespace
}  // namespace gradwire
