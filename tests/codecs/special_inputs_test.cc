// Every codec, with each value of each of its keys, on inputs where codecs tend to break: one
// value, equal values, an outlier, denormals, -0, the largest floats, and 16-bit inputs.

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gradwire/codec.h"
#include "gradwire/execution.h"
#include "stages/element/bfloat16.h"
#include "stages/half/float16.h"
#include "tests/codecs/inputs.h"
#include "tests/codecs/variants.h"

namespace gradwire {
namespace {

constexpr uint64_t kChunk = 40960;
constexpr float kTiny = 0x1p-149f;

std::vector<std::vector<float>> special_inputs() {
  std::vector<std::vector<float>> all;
  for (float value : {1.0f, -0.0f, kTiny, -3 * kTiny, 1e-39f, 1e-3f, FLT_MIN, -FLT_MAX}) {
    for (size_t n : {1, 600}) all.emplace_back(n, value);
    all.emplace_back(600);  // the value alone among zeros
    all.back()[511] = value;
    all.push_back(gaussian(600, 1));  // the value among ordinary values
    all.back()[3] = value;
    for (float& x : all.back()) x *= 1e-3f;
    all.back()[3] = value;
  }
  all.emplace_back(kChunk + 9, -0.25f);
  all.push_back(heavy_tailed(kChunk + 9, 3));
  // The longest payloads of some coder: every value is sent, or every second, or every third.
  for (size_t period : {1, 2, 3}) {
    all.emplace_back(kChunk + 9);
    for (size_t i = 0; i < all.back().size(); i += period) all.back()[i] = i % 4 < 2 ? 2.0f : -2.0f;
  }
  return all;
}

std::string name_of(const Codec& codec) { return std::string(codec.info().name); }

// The bound of |x - decoded| in the codec's spec.md, with the scale of all values.
double bound_of(const std::string& spec, const Codec& codec, float x, double largest,
                double length) {
  const std::string name = name_of(codec);
  const double magnitude = std::fabs(double{x});
  const bool half = spec.find("values=bf16") != std::string::npos;
  if (name == "raw") return 0;
  if (name == "bf16") return magnitude * 0x1p-8 + 0x1p-134;
  if (name == "fp16") return magnitude > 65504 ? INFINITY : magnitude * 0x1p-11 + 0x1p-25;
  if (name == "int8") return largest / 127 * 0.5001 + 64 * double{kTiny};
  if (name == "topk") return half && magnitude > 1e38 ? INFINITY : magnitude;
  if (name == "inceptionn") {
    const int bound = 10 - 2 * (codec.wire().param_a & 3);
    const bool strict = (codec.wire().param_a & 4) != 0;
    return magnitude < 1 ? std::ldexp(1.0, -(strict ? bound : std::min(bound, 7))) : 0;
  }
  if (name == "truncate") {
    const double shares[] = {0x1p-7, 1.0 / 3, 0.75};
    return magnitude * shares[codec.wire().param_a] + 0x1p-126;
  }
  if (name == "qsgd") {
    const int levels = (codec.wire().param_a & 127) | (codec.wire().param_a >> 10) << 7;
    const bool l2 = spec.find("norm=l2") != std::string::npos;
    return std::min((l2 ? length : largest) / levels * 1.000001, 1.0 * FLT_MAX) + double{kTiny};
  }
  if (name == "qgd") return std::min(length * 1.000001, 1.0 * FLT_MAX) + double{kTiny};
  // Codecs of two or three values, none above the largest magnitude; 3lc's m / 2 is below it too.
  return largest;
}

struct Encoded {
  std::vector<std::byte> payload;
  std::vector<float> f32;
  std::vector<uint16_t> bf16;

  friend bool operator==(const Encoded& a, const Encoded& b) {
    return a.payload == b.payload && a.bf16 == b.bf16 && a.f32.size() == b.f32.size() &&
           (a.f32.empty() || std::memcmp(a.f32.data(), b.f32.data(), a.f32.size() * 4) == 0);
  }
};

// Encodes two steps, so that the second starts from a residual, and checks that nothing is written
// after the payload's room.
Encoded encoded_twice(const Codec& codec, const InputView& x, Execution& execution) {
  Encoded made;
  ResidualView residual;
  if (codec.residual_type() == ResidualType::kFloat32) {
    made.f32.resize(x.size());
    residual = ResidualView(std::span(made.f32));
  } else if (codec.residual_type() == ResidualType::kBfloat16) {
    made.bf16.resize(x.size());
    residual = ResidualView(std::span(made.bf16));
  }
  const uint64_t room = codec.max_payload_size(x.size());
  for (uint64_t step : {0, 1}) {
    made.payload.assign(room + 64, std::byte{0xa5});
    const Result<uint64_t> size = codec.encode(x, residual, {.seed = 1, .step = step},
                                               std::span(made.payload).first(room), execution);
    // Sums of the largest floats overflow, and 16-bit types cannot hold them.
    if (size.status().code() == StatusCode::kNonFinite) return {};
    EXPECT_TRUE(size.ok()) << size.status().message();
    EXPECT_LE(size.value(), room);
    EXPECT_TRUE(std::all_of(made.payload.begin() + static_cast<ptrdiff_t>(room), made.payload.end(),
                            [](std::byte b) { return b == std::byte{0xa5}; }));
    made.payload.resize(size.value());
  }
  return made;
}

TEST(EveryCodec, SpecialInputsGiveTheSameBytesEverywhere) {
  Execution scalar = Execution::create("scalar").value();
  const auto inputs = special_inputs();
  for (const std::string& spec : codec_variants()) {
    const auto codec = Codec::parse(spec).value();
    for (size_t k = 0; k < inputs.size(); ++k) {
      const Encoded expected = encoded_twice(*codec, inputs[k], scalar);
      for (std::string_view target : simd_targets()) {
        Execution execution =
            Execution::create(target, 1 + static_cast<int>(k % 3), Threading::kAlways).value();
        ASSERT_EQ(encoded_twice(*codec, inputs[k], execution), expected)
            << spec << " " << target << ", input " << k;
      }
    }
  }
}

TEST(EveryCodec, SpecialInputsStayWithinTheStatedError) {
  const auto inputs = special_inputs();
  for (const std::string& spec : codec_variants()) {
    const auto codec = Codec::parse(spec).value();
    for (size_t k = 0; k < inputs.size(); ++k) {
      const std::vector<float>& x = inputs[k];
      double largest = 0;
      double squares = 0;
      for (float value : x) {
        largest = std::max(largest, std::fabs(double{value}));
        squares += double{value} * value;
      }
      // The largest float rounds to infinity in 16 bits, which is an error if a residual is kept.
      const bool is_half = name_of(*codec) == "bf16" || name_of(*codec) == "fp16";
      if (is_half && largest > 65504) continue;
      if (largest > 1e38 && spec.find("values=bf16") != std::string::npos) continue;
      const std::vector<float> decoded = decoded_by(*codec, x);
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_LE(std::fabs(double{x[i]} - decoded[i]),
                  bound_of(spec, *codec, x[i], largest, std::sqrt(squares)))
            << spec << ", input " << k << " at " << i;
      }
    }
  }
}

TEST(EveryCodec, AllZeroDecodesToZero) {
  for (const std::string& spec : codec_variants()) {
    const auto codec = Codec::parse(spec).value();
    for (float zero : {0.0f, -0.0f}) {
      for (uint64_t n : {uint64_t{1}, uint64_t{5}, kChunk + 1}) {
        const Sent sent(*codec, std::vector<float>(n, zero));
        for (float value : sent.decoded) ASSERT_EQ(value, 0.0f) << spec;
        for (float value : sent.residual) ASSERT_EQ(value, 0.0f) << spec;
      }
    }
  }
}

// With one byte less than max_payload_size nothing is written, and the residual is as it was.
TEST(EveryCodec, OneByteLessFailsCleanly) {
  for (const std::string& spec : codec_variants()) {
    const auto codec = Codec::parse(spec).value();
    for (const char* target : {"scalar", "auto"}) {
      Execution execution = Execution::create(target, 2, Threading::kAlways).value();
      for (uint64_t n : {uint64_t{1}, uint64_t{600}, kChunk + 1}) {
        std::vector<float> residual(n, 0.5f);
        std::vector<uint16_t> half(n, 0x3f00);
        const ResidualView view = codec->residual_type() == ResidualType::kNone ? ResidualView()
                                  : codec->residual_type() == ResidualType::kFloat32
                                      ? ResidualView(std::span(residual))
                                      : ResidualView(std::span(half));
        std::vector<std::byte> payload(codec->max_payload_size(n) - 1, std::byte{0xa5});
        const auto status =
            codec->encode(heavy_tailed(n, 1), view, {}, payload, execution).status();
        ASSERT_EQ(status.code(), StatusCode::kBufferTooSmall) << spec << " " << n;
        ASSERT_EQ(payload, std::vector<std::byte>(payload.size(), std::byte{0xa5})) << spec;
        ASSERT_EQ(residual, std::vector<float>(n, 0.5f)) << spec;
        ASSERT_EQ(half, std::vector<uint16_t>(n, 0x3f00)) << spec;
      }
    }
  }
}

// 16-bit inputs are encoded as the float32 that they equal, with the same residual.
TEST(EveryCodec, SixteenBitInputsAreTheFloatsThatTheyEqual) {
  for (Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    for (uint64_t n : {uint64_t{1}, uint64_t{601}, kChunk + 321}) {
      // -0, denormals and ordinary values up to 2, so that no sum overflows.
      std::vector<uint16_t> bits(n);
      std::vector<float> wide(n);
      for (uint64_t i = 0; i < n; ++i) {
        bits[i] = static_cast<uint16_t>((i * 40503) & 0xbfff);
        wide[i] = dtype == Dtype::kBfloat16 ? widen_bf16(bits[i]) : widen_f16(bits[i]);
      }
      for (const std::string& spec : codec_variants()) {
        const auto codec = Codec::parse(spec).value();
        for (std::string_view target : simd_targets()) {
          Execution execution = Execution::create(target, 2, Threading::kAlways).value();
          const Encoded narrow = encoded_twice(*codec, InputView(dtype, bits), execution);
          if (spec == "raw") {
            ASSERT_EQ(narrow.payload.size(), 2 * n);
            ASSERT_EQ(std::memcmp(narrow.payload.data(), bits.data(), 2 * n), 0);
            std::vector<float> decoded(n);
            const auto sent = Codec::from_wire(codec->wire(), dtype).value();
            ASSERT_TRUE(sent->decode(narrow.payload, decoded, DecodeMode::kStore, execution).ok());
            ASSERT_EQ(decoded, wide);
            continue;
          }
          ASSERT_FALSE(narrow.payload.empty() && n > 1) << spec;
          ASSERT_EQ(narrow, encoded_twice(*codec, wide, execution)) << spec << " " << target;
        }
      }
    }
  }
}

// TernGrad, section 3.3: under one scale the sum of N workers is one of 2 N + 1 values.
TEST(TernGrad, NWorkersWithOneScaleSumTo2NPlus1Levels) {
  constexpr uint64_t kWorkers = 4;
  for (const char* spec : {"terngrad:clip=0", "terngrad:clip=0,pack=trits5", "stoch3"}) {
    const auto codec = Codec::parse(spec).value();
    std::vector<float> sum(100000);
    for (uint64_t worker = 0; worker < kWorkers; ++worker) {
      std::vector<float> x = gaussian(sum.size(), worker);
      for (float& value : x) value = std::clamp(value, -2.0f, 2.0f);
      x[worker] = 2.0f;  // so that all workers have one scale
      const Sent sent(*codec, x, {.stream = worker});
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += sent.decoded[i];
    }
    const std::set<float> levels(sum.begin(), sum.end());
    EXPECT_EQ(levels, (std::set<float>{-8, -6, -4, -2, 0, 2, 4, 6, 8})) << spec;
  }
}

}  // namespace
}  // namespace gradwire
