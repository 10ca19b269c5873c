// What stc promises beyond the properties of every codec.

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

#include "gradwire/compressor.h"

namespace gradwire {
namespace {

std::vector<float> normal(size_t n) {
  std::mt19937 random(9);
  std::normal_distribution<float> distribution;
  std::vector<float> x(n);
  for (float& value : x) value = distribution(random);
  return x;
}

std::vector<float> send(const std::string& text, const std::vector<float>& x) {
  Execution execution = Execution::create().value();
  Compressor compressor = Compressor::create(Codec::parse(text).value(), x.size()).value();
  std::vector<std::byte> frame(compressor.max_encoded_size());
  const EncodedFrame encoded = compressor.encode(x, 0, frame, execution).value();
  std::vector<float> values(x.size());
  const Frame parsed = parse_frame(std::span(frame).first(encoded.size)).value();
  EXPECT_TRUE(decode_frame(parsed, values, DecodeMode::kStore, execution).ok());
  return values;
}

TEST(Stc, SendsTheLargestWithTheirMeanMagnitude) {
  const auto x = normal(100'000);
  for (const char* coder : {"rice", "zre", "none"}) {
    const auto sent = send(std::string("stc:density=0.02,coder=") + coder, x);
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

// 16 to 17 bits a value sent would be positions as numbers.
TEST(Stc, TakesAFewBitsAValueSent) {
  const auto x = normal(1'000'000);
  Execution execution = Execution::create().value();
  Compressor compressor = Compressor::create(Codec::parse("stc").value(), x.size()).value();
  std::vector<std::byte> frame(compressor.max_encoded_size());
  const EncodedFrame encoded = compressor.encode(x, 0, frame, execution).value();
  EXPECT_LT(8.0 * static_cast<double>(encoded.size), 0.10 * 1'000'000);
}

}  // namespace
}  // namespace gradwire
