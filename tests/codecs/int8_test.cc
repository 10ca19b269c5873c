#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"

#include "tests/codecs/inputs.h"

namespace gradwire {
namespace {

TEST(Int8, ErrorIsAtMostHalfAUnit) {
  for (const char* spec : {"int8", "int8:bucket=100", "int8:bucket=1", "int8:ef=off"}) {
    const auto codec = Codec::parse(spec).value();
    const std::vector<float> x = heavy_tailed(50000, 9);
    const std::vector<float> decoded = decoded_by(*codec, x);
    const size_t bucket = codec->wire().param_b == 0 ? x.size() : codec->wire().param_b;
    for (size_t begin = 0; begin < x.size(); begin += bucket) {
      const size_t end = std::min(x.size(), begin + bucket);
      float largest = 0;
      for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(x[i]));
      const float unit = largest / 127;
      for (size_t i = begin; i < end; ++i) {
        ASSERT_LE(std::fabs(x[i] - decoded[i]), unit / 2 * 1.0001f) << spec << " " << i;
        ASSERT_LE(std::fabs(decoded[i]), largest * 1.0001f);
      }
    }
  }
}

TEST(Int8, TheLargestMagnitudesSurvive) {
  const auto codec = Codec::parse("int8").value();
  const std::vector<float> decoded = decoded_by(*codec, {FLT_MAX, -FLT_MAX, 0.25f});
  EXPECT_TRUE(std::isfinite(decoded[0]));
  EXPECT_NEAR(decoded[0] / FLT_MAX, 1.0f, 1e-6f);
  EXPECT_EQ(decoded[1], -decoded[0]);
  EXPECT_EQ(decoded[2], 0.0f);
}

// Denormals whose unit rounds to 0 or up.
TEST(Int8, TinyValues) {
  const auto codec = Codec::parse("int8").value();
  const float tiny = std::bit_cast<float>(1u);
  Sent sent(*codec, {3 * tiny, -tiny});
  EXPECT_TRUE(sent.payload.empty());
  EXPECT_EQ(sent.residual, std::vector<float>({3 * tiny, -tiny}));
  sent = Sent(*codec, {190 * tiny, -2 * tiny});
  EXPECT_EQ(sent.decoded, std::vector<float>({127 * tiny, -2 * tiny}));
  EXPECT_EQ(sent.residual, std::vector<float>({63 * tiny, 0.0f}));
}

TEST(Int8, RefusesWhatNoEncoderWrites) {
  const auto codec = Codec::parse("int8:bucket=2").value();
  const Sent sent(*codec, {1.0f, 2.0f, -3.0f});
  const auto status_with = [&](size_t at, const std::vector<int>& bytes) {
    return code_with(*codec, sent, at, bytes);
  };
  EXPECT_EQ(status_with(0, {}), StatusCode::kOk);
  EXPECT_EQ(status_with(8, {0x81}), StatusCode::kOk);
  EXPECT_EQ(status_with(8, {0x80}), StatusCode::kCorruptPayload);              // -128
  EXPECT_EQ(status_with(4, {0, 0, 0x80, 0x7f}), StatusCode::kCorruptPayload);  // infinity
  EXPECT_EQ(status_with(4, {0, 0, 0, 0x80}), StatusCode::kCorruptPayload);     // -0
  EXPECT_EQ(status_with(4, {4, 2, 1, 0x7c}), StatusCode::kCorruptPayload);     // too large
  EXPECT_EQ(status_with(4, {3, 2, 1, 0x7c}), StatusCode::kOk);
  EXPECT_EQ(status_with(0, {0, 0, 0, 0, 0, 0, 0, 0}), StatusCode::kCorruptPayload);
}

}  // namespace
}  // namespace gradwire
