// Values up to the largest float, whose sums with a residual overflow: each codec with a residual
// sends finite values or refuses the step and says why, and never keeps a residual that is not
// finite. Scalar code and all SIMD targets do the same.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "gradwire/compressor.h"
#include "gradwire/frame.h"
#include "stages/element/bfloat16.h"
#include "stages/half/float16.h"
#include "tests/codecs/inputs.h"
#include "tests/codecs/variants.h"

namespace gradwire {
namespace {

constexpr int kSteps = 6;

// A step in which all values are finite, many close to the largest of the dtype.
std::vector<float> huge_values(uint64_t n, std::mt19937_64& random, Dtype dtype) {
  const float most = dtype == Dtype::kFloat16 ? 65504.0f : FLT_MAX;
  std::vector<float> x(n);
  std::uniform_real_distribution<float> share(-1.0f, 1.0f);
  const uint64_t kind = random() % 4;
  for (float& value : x) {
    value = kind == 0   ? most * share(random)
            : kind == 1 ? std::copysign(most, share(random))
            : kind == 2 ? most * (1 - std::fabs(share(random)) / 512)
                        : share(random);
  }
  if (kind == 3 && n > 0) x[random() % n] = random() % 2 == 0 ? most : -0.75f * most;
  return x;
}

// Every step's input, in `dtype`: float32, or the bits of 16-bit values.
struct Inputs {
  std::vector<std::vector<float>> wide;
  std::vector<std::vector<uint16_t>> bits;
  Dtype dtype;

  Inputs(uint64_t n, Dtype type, uint64_t seed) : dtype(type) {
    std::mt19937_64 random(seed);
    for (int step = 0; step < kSteps; ++step) {
      wide.push_back(huge_values(n, random, dtype));
      if (dtype == Dtype::kFloat32) continue;
      const bool bf16 = dtype == Dtype::kBfloat16;
      bits.emplace_back();
      for (float& value : wide.back()) {
        bits.back().push_back(bf16 ? narrow_bf16_finite(value) : narrow_f16(value));
        value = bf16 ? widen_bf16(bits.back().back()) : widen_f16(bits.back().back());
      }
    }
  }

  [[nodiscard]] InputView view(int step) const {
    if (dtype == Dtype::kFloat32) return wide[step];
    return {dtype, bits[step]};
  }
};

// What a step left: the frame, and the residual.
struct Left {
  std::vector<std::byte> frame;
  std::vector<float> residual;
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Checks each step, and returns what was left.
std::vector<Left> run(const std::string& spec, const Inputs& inputs, std::string_view target,
                      int& refused) {
  Execution execution = Execution::create(target, 2, Threading::kAlways).value();
  const auto codec = Codec::parse(spec).value();
  const uint64_t n = inputs.wide[0].size();
  Compressor compressor = Compressor::create(codec, n).value();
  std::vector<Left> all;
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<float> before = compressor.residual().values();
    std::vector<std::byte> frame(compressor.max_encoded_size());
    const Result<EncodedFrame> encoded =
        compressor.encode(inputs.view(step), step, frame, execution);
    EXPECT_TRUE(encoded.ok()) << encoded.status().message();
    frame.resize(encoded.value().size);
    const std::vector<float> after = compressor.residual().values();
    const auto is_finite = [](float value) { return std::isfinite(value); };
    EXPECT_TRUE(std::ranges::all_of(after, is_finite)) << spec << ", step " << step;
    std::vector<float> decoded(n);
    EXPECT_TRUE(
        decode_frame(parse_frame(frame).value(), decoded, DecodeMode::kStore, execution).ok());
    const Status why = encoded.value().non_finite;
    if (why.ok()) {
      EXPECT_TRUE(std::ranges::all_of(decoded, is_finite)) << spec << ", step " << step;
    } else {
      ++refused;
      EXPECT_NE(why.message().find("is too large once the residual is added"), std::string::npos)
          << why.message();
      EXPECT_NE(why.message().find(": element "), std::string::npos) << why.message();
      // Codecs with groups restore the residuals of groups that they had encoded, up to the
      // rounding of x + residual.
      for (uint64_t i = 0; i < n; ++i) {
        const double size = std::fabs(double{inputs.wide[step][i]}) + std::fabs(before[i]);
        const double unit = spec.find("residual=bf16") == std::string::npos ? 0x1p-22 : 0x1p-7;
        EXPECT_NEAR(after[i], before[i], size * unit) << spec << ", step " << step << " at " << i;
      }
      if (spec.find("bucket=") == std::string::npos && spec.find("qsgd") == std::string::npos) {
        EXPECT_TRUE(same(after, before)) << spec << ", step " << step;
      }
    }
    all.push_back({std::move(frame), after});
  }
  return all;
}

std::vector<std::string> with_residuals() {
  std::vector<std::string> specs;
  for (std::string spec : codec_variants()) {
    if (Codec::parse(spec).value()->residual_type() != ResidualType::kNone) specs.push_back(spec);
  }
  for (const char* spec : {"stc:density=0.3,residual=bf16", "onebit:bucket=8,residual=bf16",
                           "topk:ratio=0.3,residual=bf16", "3lc:s=1.99,residual=bf16",
                           "int8:bucket=64,residual=bf16", "qsgd:bits=3,ef=on,residual=bf16",
                           "topk2bit:density=0.3,residual=bf16", "truncate:bits=24,ef=on"}) {
    specs.emplace_back(spec);
  }
  return specs;
}

TEST(LargestValues, LeaveAFiniteResidualOnEveryTarget) {
  int refused = 0;
  for (const std::string& spec : with_residuals()) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
      for (const uint64_t n : {uint64_t{1}, uint64_t{70}, uint64_t{601}, kChunkValues + 9}) {
        if (n > 601 && dtype != Dtype::kFloat32) continue;
        const Inputs inputs(n, dtype, n);
        const std::vector<Left> expected = run(spec, inputs, "scalar", refused);
        if (testing::Test::HasFailure()) return;
        for (const std::string_view target : simd_targets()) {
          const std::vector<Left> found = run(spec, inputs, target, refused);
          for (int step = 0; step < kSteps; ++step) {
            ASSERT_EQ(found[step].frame, expected[step].frame) << spec << " " << target;
            ASSERT_TRUE(same(found[step].residual, expected[step].residual))
                << spec << " " << target;
          }
        }
      }
    }
  }
  EXPECT_GT(refused, 1000) << "too few sums overflowed to test anything";
}

}  // namespace
}  // namespace gradwire
