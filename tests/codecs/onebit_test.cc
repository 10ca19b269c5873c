#include <cmath>
#include <vector>

#include "gtest/gtest.h"

#include "tests/codecs/inputs.h"

namespace gradwire {
namespace {

double squared_error(const std::vector<float>& x, float positive, float negative) {
  double sum = 0;
  for (float value : x) {
    const double off = double{value} - double{value < 0 ? negative : positive};
    sum += off * off;
  }
  return sum;
}

// 3LC, section 4.2 (MQE): of all codes with these signs, the two means have the least error.
TEST(OneBit, TheMeansMinimiseTheSquaredError) {
  const std::vector<float> x = heavy_tailed(50000, 1);
  const Sent sent(*Codec::parse("onebit").value(), x);
  float positive = 0;
  float negative = 0;
  for (size_t i = 0; i < x.size(); ++i) (x[i] < 0 ? negative : positive) = sent.decoded[i];
  const double least = squared_error(x, positive, negative);
  for (float off : {-0.1f, -0.001f, -1e-5f, 1e-5f, 0.001f, 0.1f}) {
    EXPECT_GT(squared_error(x, positive * (1 + off), negative), least) << off;
    EXPECT_GT(squared_error(x, positive, negative * (1 + off)), least) << off;
    EXPECT_GT(squared_error(x, positive * (1 + off), negative * (1 + off)), least) << off;
  }
}

TEST(OneBit, EachBucketHasItsMeans) {
  const auto codec = Codec::parse("onebit:bucket=8").value();
  const Sent sent(*codec, {1, 2, 3, -4, -6, 0, -0.0f, 0, -8, -10});
  EXPECT_EQ(sent.decoded, std::vector<float>({1, 1, 1, -5, -5, 1, 1, 1, -9, -9}));
  EXPECT_EQ(sent.residual, std::vector<float>({0, 1, 2, 1, -1, -1, -1, -1, 1, -1}));
  EXPECT_EQ(sent.payload.size(), 2 * 8 + 2u);
}

// Nothing is lost: after any number of steps, the sum of the decoded values and the residual is the
// sum of the inputs.
TEST(OneBit, SumsArriveInTheEnd) {
  const auto codec = Codec::parse("onebit").value();
  std::vector<float> residual;
  std::vector<double> input(1000), decoded(1000);
  for (uint64_t step = 0; step < 50; ++step) {
    const std::vector<float> x = gaussian(1000, step);
    const Sent sent(*codec, x, {}, residual);
    residual = sent.residual;
    for (size_t i = 0; i < x.size(); ++i) input[i] += x[i], decoded[i] += sent.decoded[i];
  }
  for (size_t i = 0; i < input.size(); ++i) {
    ASSERT_NEAR(input[i], decoded[i] + residual[i], 1e-4) << i;
  }
}

TEST(OneBit, OneSignAndNothing) {
  const auto codec = Codec::parse("onebit").value();
  EXPECT_EQ(decoded_by(*codec, {-1, -3}), std::vector<float>({-2, -2}));
  EXPECT_EQ(decoded_by(*codec, {0, 3}), std::vector<float>({1.5f, 1.5f}));
  EXPECT_TRUE(Sent(*codec, std::vector<float>(100, -0.0f)).payload.empty());
  const Sent cancelled(*codec, std::vector<float>(100, -2.0f), {}, std::vector<float>(100, 2.0f));
  EXPECT_TRUE(cancelled.payload.empty());
  EXPECT_EQ(cancelled.residual, std::vector<float>(100, 0.0f));
  std::vector<float> tiny(100);
  tiny[5] = 1e-45f;
  const Sent unsent(*codec, tiny);
  EXPECT_TRUE(unsent.payload.empty()) << "its mean rounds to 0";
  EXPECT_EQ(unsent.residual, tiny);
}

TEST(OneBit, RefusesWhatNoEncoderWrites) {
  const auto codec = Codec::parse("onebit").value();
  const Sent sent(*codec, {1, -2, 3});
  const auto status_with = [&](size_t at, const std::vector<int>& bytes) {
    return code_with(*codec, sent, at, bytes);
  };
  EXPECT_EQ(status_with(0, {}), StatusCode::kOk);
  EXPECT_EQ(status_with(8, {7}), StatusCode::kOk);
  EXPECT_EQ(status_with(8, {8}), StatusCode::kCorruptPayload);                 // padding
  EXPECT_EQ(status_with(0, {0, 0, 0, 0x80}), StatusCode::kCorruptPayload);     // -0
  EXPECT_EQ(status_with(0, {0, 0, 0x80, 0xbf}), StatusCode::kCorruptPayload);  // -1
  EXPECT_EQ(status_with(0, {0, 0, 0x80, 0x7f}), StatusCode::kCorruptPayload);  // infinity
  EXPECT_EQ(status_with(0, {0, 0, 0, 0}), StatusCode::kOk);
  EXPECT_EQ(status_with(4, {0, 0, 0, 0}), StatusCode::kOk);
  EXPECT_EQ(status_with(4, {0, 0, 0, 0x80}), StatusCode::kCorruptPayload);     // -0
  EXPECT_EQ(status_with(4, {0, 0, 0x80, 0x3f}), StatusCode::kCorruptPayload);  // 1
  EXPECT_EQ(status_with(4, {0, 0, 0x80, 0xff}), StatusCode::kCorruptPayload);  // -infinity
  EXPECT_EQ(status_with(4, {0, 0, 0xc0, 0xff}), StatusCode::kCorruptPayload);  // NaN
  EXPECT_EQ(status_with(0, {0, 0, 0, 0, 0, 0, 0, 0}), StatusCode::kCorruptPayload);
}

}  // namespace
}  // namespace gradwire
