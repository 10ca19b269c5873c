#include "gradwire/compressor.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace gradwire {
namespace {

std::vector<float> encode_decode(Compressor& compressor, const std::vector<float>& x,
                                 uint64_t step) {
  Execution execution = Execution::create().value();
  std::vector<std::byte> frame(compressor.max_encoded_size());
  const EncodedFrame encoded = compressor.encode(x, step, frame, execution).value();
  frame.resize(encoded.size);
  std::vector<float> out(x.size());
  EXPECT_TRUE(decode_frame(parse_frame(frame).value(), out, DecodeMode::kStore, execution).ok());
  return out;
}

// The sent values and the residual add up to the inputs.
TEST(Compressor, LosesNothingOverManySteps) {
  for (const char* spec : {"3lc", "3lc:s=1.9", "3lc:residual=bf16", "bf16:ef=on"}) {
    constexpr size_t kN = 1000;
    Compressor compressor = Compressor::create(Codec::parse(spec).value(), kN).value();
    std::mt19937_64 random(4);
    std::normal_distribution<float> normal;
    std::vector<double> in(kN);
    std::vector<double> out(kN);
    for (uint64_t step = 0; step < 50; ++step) {
      std::vector<float> x(kN);
      for (size_t i = 0; i < kN; ++i) in[i] += x[i] = normal(random);
      const std::vector<float> sent = encode_decode(compressor, x, step);
      for (size_t i = 0; i < kN; ++i) out[i] += sent[i];
    }
    const std::vector<float> kept = compressor.residual().values();
    // A bf16 residual rounds to 8 bits in each step.
    const double tolerance =
        std::string(spec).find("residual=bf16") == std::string::npos ? 1e-4 : 1;
    for (size_t i = 0; i < kN; ++i) ASSERT_NEAR(out[i] + kept[i], in[i], tolerance) << spec;
  }
}

double norm_of(const std::vector<float>& values) {
  double squares = 0;
  for (float value : values) squares += double{value} * double{value};
  return std::sqrt(squares);
}

// Whatever a codec takes error feedback with, the residual does not grow with the steps.
TEST(Compressor, KeepsABoundedResidual) {
  std::vector<std::string> specs = {"3lc:s=1.75",
                                    "onebit:bucket=512",
                                    "qsgd:bits=3,ef=on",
                                    "qsgd:levels=2,ef=on",
                                    "qsgd:bits=4,bucket=192,norm=l2,ef=on",
                                    "qsgd:levels=2,bucket=8,norm=l2,ef=on"};
  for (const CodecInfo* info : codecs()) {
    if (!info->lossless && info->takes_feedback) {
      specs.push_back(std::string(info->name) + ":ef=on");
    }
  }
  for (const std::string& spec : specs) {
    for (const float tail : {0.0f, 1.0f}) {
      constexpr size_t kN = 2000;
      Compressor compressor = Compressor::create(Codec::parse(spec).value(), kN).value();
      std::mt19937_64 random(5);
      std::normal_distribution<float> normal;
      double largest_input = 0;
      for (uint64_t step = 0; step < 200; ++step) {
        std::vector<float> x(kN);
        for (float& value : x) value = normal(random) * std::exp(tail * normal(random));
        largest_input = std::max(largest_input, norm_of(x));
        encode_decode(compressor, x, step);
      }
      EXPECT_LT(norm_of(compressor.residual().values()), 12 * largest_input) << spec << " " << tail;
    }
  }
}

TEST(Compressor, WithoutFeedbackKeepsNothing) {
  Compressor compressor = Compressor::create(Codec::parse("3lc:ef=off").value(), 10).value();
  EXPECT_EQ(compressor.residual().size(), 0u);
  const std::vector<float> x = {1, 0.4f, 0.2f, 0, 0, 0, 0, 0, 0, -1};
  EXPECT_EQ(encode_decode(compressor, x, 0), encode_decode(compressor, x, 1));
}

TEST(Compressor, RefusesAnotherLength) {
  Compressor compressor = Compressor::create(Codec::parse("3lc").value(), 10).value();
  Execution execution = Execution::create().value();
  std::vector<std::byte> frame(compressor.max_encoded_size());
  EXPECT_EQ(compressor.encode(std::vector<float>(9), 0, frame, execution).status().code(),
            StatusCode::kLengthMismatch);
}

TEST(Residual, ReadsBackWhatItWasGiven) {
  Residual residual(ResidualType::kFloat32, 3);
  residual.assign(std::vector<float>{1.0f, -2.5f, 0.0f});
  residual.add(1, std::vector<float>{3.0f}, 2.0f);
  residual.scale(0.5f);
  EXPECT_EQ(residual.values(), (std::vector<float>{0.5f, 1.75f, 0.0f}));
  Residual half(ResidualType::kBfloat16, 2);
  half.assign(std::vector<float>{1.0f, 1.00390625f});  // the second is a tie, rounded to even
  EXPECT_EQ(half.values(), (std::vector<float>{1.0f, 1.0f}));
}

}  // namespace
}  // namespace gradwire
