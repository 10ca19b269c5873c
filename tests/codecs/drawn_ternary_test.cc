// terngrad and stoch3. All draws have fixed seeds; bounds are six standard deviations.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/codecs/inputs.h"

namespace gradwire {
namespace {

float scale_of(const Sent& sent, size_t bucket = 0) {
  float scale = 0;
  std::memcpy(&scale, sent.payload.data() + bucket * sizeof scale, sizeof scale);
  return scale;
}

std::vector<float> clipped_to(std::vector<float> x, float limit) {
  for (float& value : x) value = std::clamp(value, -limit, limit);
  return x;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * double{b[i]};
  return sum;
}

TEST(DrawnTernary, MeanIsTheClippedInput) {
  constexpr uint64_t kSteps = 2000;
  for (const char* spec : {"stoch3", "stoch3:bucket=320", "terngrad", "terngrad:clip=0",
                           "terngrad:clip=1,pack=trits5,bucket=640"}) {
    const auto codec = Codec::parse(spec).value();
    const std::vector<float> x = gaussian(1000, 1);
    std::vector<double> sums(x.size());
    std::vector<float> scales;
    const size_t bucket = codec->wire().param_b == 0 ? x.size() : codec->wire().param_b;
    for (uint64_t step = 0; step < kSteps; ++step) {
      const Sent sent(*codec, x, {.seed = 5, .stream = 6, .step = step});
      for (size_t i = 0; i < x.size(); ++i) sums[i] += sent.decoded[i];
      scales.clear();
      for (size_t i = 0; i < x.size(); ++i) scales.push_back(scale_of(sent, i / bucket));
    }
    double squares = 0;
    double drawn = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double want = std::clamp(x[i], -scales[i], scales[i]);
      const double p = std::fabs(want) / scales[i];
      const double deviation = scales[i] * std::sqrt(p * (1 - p) / kSteps);
      const double off = sums[i] / kSteps - want;
      ASSERT_LE(std::fabs(off), 6 * deviation + 1e-7) << spec << " " << i;
      if (p == 1) continue;
      squares += off * off / (deviation * deviation);
      ++drawn;
    }
    EXPECT_NEAR(squares / drawn, 1.0, 6 * std::sqrt(2 / drawn)) << spec;
  }
}

// TernGrad, section 3.3: "1.0 % to 1.5 %" and "2 to 3 degrees" on a Gaussian.
TEST(TernGrad, ClippingAGaussianChangesLittle) {
  const std::vector<float> x = gaussian(1000000, 2);
  const Sent sent(*Codec::parse("terngrad").value(), x);
  EXPECT_NEAR(scale_of(sent), 2.5f, 0.01f);
  const std::vector<float> clipped = clipped_to(x, scale_of(sent));
  const double length = std::sqrt(dot(x, x));
  const double clipped_length = std::sqrt(dot(clipped, clipped));
  const double shorter = 1 - clipped_length / length;
  EXPECT_GT(shorter, 0.010);
  EXPECT_LT(shorter, 0.015);
  const double degrees = std::acos(dot(x, clipped) / (length * clipped_length)) * 180 / M_PI;
  EXPECT_GT(degrees, 2.0);
  EXPECT_LT(degrees, 3.0);
}

TEST(TernGrad, ClipsToTheDeviationAboutTheMean) {
  std::vector<float> x = gaussian(200000, 3);
  for (float& value : x) value = 10 + value;
  EXPECT_NEAR(scale_of(Sent(*Codec::parse("terngrad:clip=3").value(), x)), 3.0f, 0.02f);
  const float largest = *std::max_element(x.begin(), x.end());
  EXPECT_EQ(scale_of(Sent(*Codec::parse("terngrad:clip=0").value(), x)), largest);
  EXPECT_EQ(scale_of(Sent(*Codec::parse("terngrad:clip=15.9").value(), x)), largest);
  EXPECT_EQ(scale_of(Sent(*Codec::parse("stoch3").value(), x)), largest);
}

TEST(TernGrad, WithoutDeviationNothingIsClipped) {
  const auto codec = Codec::parse("terngrad").value();
  EXPECT_EQ(decoded_by(*codec, {-3.0f}), std::vector<float>({-3.0f}));
  const std::vector<float> equal(100000, 0.1f);
  EXPECT_EQ(decoded_by(*codec, equal), equal);
}

TEST(TernGrad, PayloadsAre16And20TimesSmaller) {
  const std::vector<float> x = gaussian(1000000, 4);
  const auto ratio = [&](const char* spec) {
    const Sent sent(*Codec::parse(spec).value(), x);
    return 4.0 * static_cast<double>(x.size()) / static_cast<double>(sent.payload.size());
  };
  EXPECT_NEAR(ratio("terngrad"), 16.0, 0.001);
  EXPECT_NEAR(ratio("terngrad:pack=trits5"), 20.0, 0.001);
  EXPECT_NEAR(ratio("stoch3"), 20.0, 0.001);
  EXPECT_LT(ratio("terngrad:pack=trits5"), 32 / std::log2(3.0)) << "20.18: the limit of 3 values";
}

// Each element has its own draw.
TEST(DrawnTernary, AMillionEqualValuesDontRoundTogether) {
  for (const char* spec : {"stoch3", "terngrad:clip=0", "terngrad:clip=0,pack=trits5"}) {
    std::vector<float> x(1000001, 0.5f);
    x.back() = 1.0f;
    const std::vector<float> decoded = decoded_by(*Codec::parse(spec).value(), x);
    for (size_t distance : {1u, 2u, 4u, 8u, 32u, 64u, 320u, 4096u, 40960u}) {
      double sent = 0;
      double equal = 0;
      const size_t n = 1000000 - distance;
      for (size_t i = 0; i < n; ++i) {
        sent += decoded[i] != 0;
        equal += decoded[i] == decoded[i + distance];
      }
      EXPECT_NEAR(sent / static_cast<double>(n), 0.5, 6 * 0.5e-3) << spec;
      EXPECT_NEAR(equal / static_cast<double>(n), 0.5, 6 * 0.5e-3) << spec << " " << distance;
    }
  }
}

TEST(DrawnTernary, DrawsBelongToSeedStreamStepAndElement) {
  const auto codec = Codec::parse("stoch3").value();
  std::vector<float> x = gaussian(100000, 5);
  x[0] = 100;  // the scale
  const auto sent = [&](const DrawContext& draw) { return Sent(*codec, x, draw).payload; };
  const auto payload = sent({.seed = 1, .stream = 2, .step = 3});
  EXPECT_EQ(payload, sent({.seed = 1, .stream = 2, .step = 3}));
  EXPECT_NE(payload, sent({.seed = 2, .stream = 2, .step = 3}));
  EXPECT_NE(payload, sent({.seed = 1, .stream = 3, .step = 3}));
  EXPECT_NE(payload, sent({.seed = 1, .stream = 2, .step = 4}));
  const std::vector<float> start(x.begin(), x.begin() + 50000);
  const DrawContext draw = {.seed = 1, .stream = 2, .step = 3};
  std::vector<float> decoded = decoded_by(*codec, x, draw);
  decoded.resize(start.size());
  EXPECT_EQ(decoded_by(*codec, start, draw), decoded);
  // Packing and coding don't change the trits.
  for (const char* spec : {"stoch3:coder=zre", "stoch3:coder=rice", "terngrad:clip=0",
                           "terngrad:clip=0,pack=trits5,coder=zre"}) {
    EXPECT_EQ(decoded_by(*Codec::parse(spec).value(), start, draw), decoded) << spec;
  }
}

TEST(DrawnTernary, ErrorIsBelowTheScaleAndSignsStay) {
  for (const char* spec : {"stoch3", "terngrad", "terngrad:clip=1", "stoch3:bucket=320"}) {
    const auto codec = Codec::parse(spec).value();
    const std::vector<float> x = heavy_tailed(50000, 6);
    const Sent sent(*codec, x);
    const size_t bucket = codec->wire().param_b == 0 ? x.size() : codec->wire().param_b;
    for (size_t i = 0; i < x.size(); ++i) {
      const float scale = scale_of(sent, i / bucket);
      ASSERT_TRUE(sent.decoded[i] == 0 || sent.decoded[i] == std::copysign(scale, x[i])) << spec;
      ASSERT_LT(std::fabs(std::clamp(x[i], -scale, scale) - sent.decoded[i]), scale) << spec;
    }
  }
}

TEST(DrawnTernary, ZerosAndNonFiniteValues) {
  Execution execution = Execution::create().value();
  for (const char* spec : {"stoch3", "terngrad", "stoch3:coder=zre,bucket=320"}) {
    const auto codec = Codec::parse(spec).value();
    EXPECT_TRUE(Sent(*codec, std::vector<float>(1000, -0.0f)).payload.empty()) << spec;
    std::vector<float> x = gaussian(1000, 7);
    std::vector<std::byte> payload(codec->max_payload_size(1000));
    for (float bad :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      x[777] = bad;
      const Status status = codec->encode(x, {}, {}, payload, execution).status();
      EXPECT_EQ(status.code(), StatusCode::kNonFinite) << spec;
      EXPECT_NE(status.message().find("element 777"), std::string::npos);
    }
  }
}

TEST(TernGrad, TheLargestValuesAreClippedOrKept) {
  const float largest = std::numeric_limits<float>::max();
  const std::vector<float> x = {largest, -largest, 0.0f};
  EXPECT_EQ(decoded_by(*Codec::parse("terngrad").value(), x), x) << "2.5 deviations are beyond";
  const Sent sent(*Codec::parse("terngrad:clip=0.5").value(), x);
  EXPECT_NEAR(scale_of(sent) / largest, 0.5 * std::sqrt(2.0 / 3), 1e-6);
}

}  // namespace
}  // namespace gradwire
