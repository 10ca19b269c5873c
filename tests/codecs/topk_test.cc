// What topk promises beyond the properties of every codec.

#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "gradwire/compressor.h"

namespace gradwire {
namespace {

struct Sent {
  std::vector<float> values;
  uint64_t count = 0;
};

Sent send(const std::string& text, const std::vector<float>& x) {
  Execution execution = Execution::create().value();
  Compressor compressor = Compressor::create(Codec::parse(text).value(), x.size()).value();
  std::vector<std::byte> frame(compressor.max_encoded_size());
  const EncodedFrame encoded = compressor.encode(x, 0, frame, execution).value();
  Sent sent{std::vector<float>(x.size()), 0};
  const Frame parsed = parse_frame(std::span(frame).first(encoded.size)).value();
  EXPECT_TRUE(decode_frame(parsed, sent.values, DecodeMode::kStore, execution).ok());
  for (float value : sent.values) sent.count += value != 0.0f ? 1 : 0;
  return sent;
}

std::vector<float> normal(size_t n) {
  std::mt19937 random(5);
  std::normal_distribution<float> distribution;
  std::vector<float> x(n);
  for (float& value : x) value = distribution(random);
  return x;
}

TEST(Topk, SendsAboutTheRatioAndTheLargest) {
  const auto x = normal(300'000);
  for (float ratio : {0.01f, 0.05f, 0.25f}) {
    const Sent sent = send("topk:ratio=" + std::to_string(ratio), x);
    // Five standard deviations of a share that was estimated from 4096 values.
    const double spread = 5 * std::sqrt(ratio * (1 - ratio) / 4096.0);
    EXPECT_NEAR(static_cast<double>(sent.count) / 300'000.0, ratio, spread);
    float least_sent = INFINITY;
    float largest_kept = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      float& bound = sent.values[i] != 0.0f ? least_sent : largest_kept;
      bound = sent.values[i] != 0.0f ? std::min(bound, std::abs(x[i]))
                                     : std::max(bound, std::abs(x[i]));
      if (sent.values[i] != 0.0f) {
        ASSERT_EQ(sent.values[i], x[i]);
      }
    }
    EXPECT_GT(least_sent, largest_kept);
  }
}

TEST(Topk, IsExactWhereAllValuesAreSampled) {
  const auto x = normal(4000);
  EXPECT_EQ(send("topk:ratio=0.1", x).count, 400u);
}

TEST(Topk, EqualValuesAreSentWhole) {
  EXPECT_EQ(send("topk", std::vector<float>(50'000, -2.0f)).count, 50'000u);
}

TEST(Topk, SparseInputsAreSentWhole) {
  std::vector<float> x(100'000);
  for (size_t i = 0; i < x.size(); i += 1000) x[i] = 1e-40f;
  EXPECT_EQ(send("topk", x).count, 100u);
}

}  // namespace
}  // namespace gradwire
