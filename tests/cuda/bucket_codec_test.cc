// The GPU's bytes equal the CPU's. In a build with CUDA the tests run on the device, otherwise with
// the kernels compiled for the host (on_host/cuda_runtime.h); both use device_memory.h.

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "cuda/bucket.h"

namespace gradwire::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr DrawContext kDraw{.seed = 5, .stream = 9, .step = 3};

DrawContext draw_of(const BucketSegment& segment) {
  DrawContext own = kDraw;
  own.stream += segment.stream;
  return own;
}

// The first value that the CPU refuses, from its message.
uint64_t refused_element(const Status& status) {
  EXPECT_EQ(status.code(), StatusCode::kNonFinite);
  const std::string text(status.message());
  return std::stoull(text.substr(text.find("element ") + 8));
}

std::vector<std::byte> encode_zeros(const Codec& codec, uint64_t n) {
  Execution execution = Execution::create().value();
  std::vector<std::byte> payload(codec.max_payload_size(n));
  payload.resize(codec.encode(std::vector<float>(n), {}, {}, payload, execution).value());
  return payload;
}

// Encodes and decodes on both sides and compares.
void compare(const std::string& text, Bucket bucket) {
  SCOPED_TRACE(text);
  const auto codec = Codec::parse(text).value();
  const bool keeps = !bucket.residual.empty();
  const BucketCodec kernels = BucketCodec::create(codec, bucket.segments).value();
  DeviceArray<std::byte> table(kernels.table());
  DeviceArray<float> x_dev{std::span<const float>(bucket.x)};
  DeviceArray<float> residual_dev{std::span<const float>(bucket.residual)};
  DeviceArray<std::byte> payloads(kernels.payloads_size());
  DeviceArray<EncodedSegment> encoded(bucket.segments.size());
  DeviceArray<std::byte> scratch(kernels.encode_scratch_size());
  const Status status =
      kernels.encode({.table_dev = table.data(),
                      .x_dev = x_dev.data(),
                      .residual_type = keeps ? ResidualType::kFloat32 : ResidualType::kNone,
                      .residual_dev = residual_dev.data(),
                      .draw = kDraw,
                      .payloads_dev = payloads.data(),
                      .encoded_dev = encoded.data(),
                      .scratch_dev = scratch.data()},
                     nullptr);
  ASSERT_TRUE(status.ok()) << status.message();

  const std::vector<EncodedSegment> results = encoded.read();
  const std::vector<std::byte> bytes = payloads.read();
  const std::vector<float> left = residual_dev.read();
  std::vector<float> expected(bucket.x.size(), 0.5f);
  std::vector<float> owed = bucket.residual;  // the residual that the device must leave
  std::vector<std::vector<std::byte>> of_segments;
  Execution execution = Execution::create().value();
  for (size_t i = 0; i < bucket.segments.size(); ++i) {
    const BucketSegment& segment = bucket.segments[i];
    SCOPED_TRACE("segment " + std::to_string(i) + " of " + std::to_string(segment.n));
    std::vector<std::byte> payload(codec->max_payload_size(segment.n));
    const std::span<const float> x = bucket.of(i, bucket.x);
    const Result<uint64_t> size =
        codec->encode(x, keeps ? ResidualView(bucket.of(i, bucket.residual)) : ResidualView(),
                      draw_of(segment), payload, execution);
    EXPECT_EQ(results[i].non_finite,
              size.ok() ? EncodedSegment::kFinite : refused_element(size.status()));
    payload.resize(size.ok() ? size.value() : 0);
    ASSERT_EQ(results[i].size, payload.size());
    if (kernels.has_fixed_sizes() && !payload.empty()) {
      EXPECT_EQ(payload.size(), codec->max_payload_size(segment.n));
    }
    EXPECT_TRUE(
        std::equal(payload.begin(), payload.end(), bytes.data() + kernels.payload_offset(i)));
    // If a segment is not sent, the device leaves the residual exactly as it was.
    if (size.ok() && keeps)
      std::ranges::copy(bucket.of(i, bucket.residual), bucket.of(i, owed).begin());
    // A payload that was not sent decodes to zeros.
    if (!size.ok()) payload = encode_zeros(*codec, segment.n);
    const Status decoded =
        codec->decode(payload, bucket.of(i, expected), DecodeMode::kAdd, execution);
    ASSERT_TRUE(decoded.ok()) << decoded.message();
    of_segments.push_back(std::move(payload));
  }
  EXPECT_TRUE(same_bits(left, owed));

  const DeviceDecoded decoded =
      decode_on_device(codec, bucket, of_segments, DecodeMode::kAdd, 0.5f);
  for (size_t i = 0; i < bucket.segments.size(); ++i) {
    EXPECT_EQ(decoded.segments[i].valid, 1u);
    EXPECT_EQ(decoded.segments[i].empty, of_segments[i].empty() ? 1u : 0u);
  }
  EXPECT_TRUE(same_bits(decoded.out, expected));
}

class BucketCodecTest : public testing::TestWithParam<const char*> {};

TEST_P(BucketCodecTest, GivesTheCpusBytes) {
#ifdef GRADWIRE_ADDRESS_SANITIZER
  // A sanitizer checks the bounds but is slow, so this bucket is small.
  Bucket bucket({1, 4, 33, 319, 0, 41003, 2});
  const std::vector<float> powers = {8.0f};
#else
  Bucket bucket({1, 4, 33, 319, 0, 40960, 41003, 2, 90001});
  const std::vector<float> powers = {0.0f, 1.0f, 8.0f};
#endif
  uint32_t seed = 1;
  for (float power : powers) {
    bucket.draw(power, true, seed++);
    compare(GetParam(), bucket);
  }
  bucket.draw(3.0f, false, seed++);
  compare(GetParam(), bucket);
}

TEST(BucketCodecSizesTest, AreFixedWhereNothingIsCoded) {
  const std::vector<BucketSegment> segments = {{.n = 0}, {.n = 7}, {.offset = 7, .n = 50001}};
  const auto fixed = [&](const char* text) {
    return BucketCodec::create(Codec::parse(text).value(), segments).value().has_fixed_sizes();
  };
  for (const char* text : {"raw", "bf16", "fp16", "int8:bucket=3", "onebit", "3lc:coder=none",
                           "terngrad", "stoch3", "stc:coder=none", "qsgd"}) {
    EXPECT_TRUE(fixed(text)) << text;
  }
  for (const char* text : {"3lc", "3lc:coder=rice", "terngrad:pack=trits5,coder=zre", "stc", "topk",
                           "topk:index=rice", "qsgd:coder=elias", "inceptionn"}) {
    EXPECT_FALSE(fixed(text)) << text;
  }
}

TEST_P(BucketCodecTest, NamesTheFirstValueThatIsNotFinite) {
  Bucket bucket({33, 41003, 70, 83000, 1});
  for (bool with_residual : {false, true}) {
    bucket.draw(1.0f, with_residual, 7);
    bucket.of(0, bucket.x)[20] = kNan;
    bucket.of(0, bucket.x)[31] = kInfinity;
    bucket.of(1, bucket.x)[40977] = -kInfinity;
    bucket.of(3, bucket.x)[81927] = kLargest;
    bucket.of(3, bucket.x)[40961] = -kLargest;
    bucket.of(4, bucket.x)[0] = kNan;
    // This is too large for bfloat16 with a residual.
    bucket.of(2, bucket.x)[65] = 3.4e38f;
    if (with_residual) {
      bucket.of(1, bucket.residual)[40970] = kNan;
      bucket.of(3, bucket.residual)[81927] = kLargest;
      bucket.of(3, bucket.residual)[40961] = -kLargest;
    }
    compare(GetParam(), bucket);
  }
}

// Zeros of either sign, values that the residual cancels, and values so small that the scale
// becomes 0.
TEST_P(BucketCodecTest, SendsNothingWhereNothingIs) {
  Bucket bucket({5, 700, 41003, 33, 12});
  bucket.draw(1.0f, true, 11);
  for (float& x : bucket.of(0, bucket.x)) x = 0.0f;
  for (float& r : bucket.of(0, bucket.residual)) r = -0.0f;
  for (size_t segment : {1u, 2u}) {
    for (size_t i = 0; i < bucket.segments[segment].n; ++i) {
      bucket.of(segment, bucket.x)[i] = -bucket.of(segment, bucket.residual)[i];
    }
  }
  for (float& x : bucket.of(3, bucket.x)) x = std::copysign(0x1p-149f, x);
  for (float& r : bucket.of(3, bucket.residual)) r = 0.0f;
  compare(GetParam(), bucket);
  bucket.residual.clear();
  for (size_t segment : {1u, 2u}) {
    for (float& x : bucket.of(segment, bucket.x)) x = std::copysign(0.0f, x);
  }
  compare(GetParam(), bucket);
}

// Without segments, or without values, no kernel may be launched: a grid without blocks is an
// error.
TEST_P(BucketCodecTest, TakesNothing) {
  compare(GetParam(), Bucket({}));
  compare(GetParam(), Bucket({0, 0}));
}

TEST(BucketCodec, RefusesWhatItCannotNumber) {
  const std::vector<BucketSegment> scales = {{.n = uint64_t{1} << 34}};
  EXPECT_EQ(BucketCodec::create(Codec::parse("int8:bucket=3").value(), scales).status().code(),
            StatusCode::kLimitExceeded);
  const std::vector<BucketSegment> values = {{.n = kMaxNumel + 1}};
  EXPECT_EQ(BucketCodec::create(Codec::parse("raw").value(), values).status().code(),
            StatusCode::kInvalidArgument);
}

// More segments than blocks, so that a block reads several chunks (ternary/rice_decode.cuh).
TEST(BucketCodec, RefusesCodecsWithoutKernels) {
  const std::vector<BucketSegment> segments = Bucket({1000}).segments;
  for (const auto& [text, named] : {std::pair{"qgd", "codec qgd has no kernels for the GPU"},
                                    {"qsgd:levels=128", "codec qsgd:levels=128, with these"}}) {
    const Status status = BucketCodec::create(Codec::parse(text).value(), segments).status();
    EXPECT_EQ(status.code(), StatusCode::kUnknownCodec) << text;
    EXPECT_NE(status.message().find(named), std::string::npos) << status.message();
  }
  EXPECT_TRUE(BucketCodec::create(Codec::parse("qsgd:levels=127").value(), segments).ok());
}

TEST(BucketCodec, TakesManySegments) {
  std::vector<uint64_t> lengths(530);
  for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = i % 67;
  lengths[300] = 50001;
  Bucket bucket(lengths, 0);
  bucket.draw(4.0f, true, 13);
  compare("3lc:coder=rice", bucket);
}

// Inputs and residuals of 16 bits.
TEST_P(BucketCodecTest, TakesHalves) {
  const auto codec = Codec::parse(GetParam()).value();
  const Bucket bucket({7, 41003, 40});
  std::mt19937 random(3);
  std::vector<uint16_t> x(bucket.x.size());
  std::vector<uint16_t> residual(x.size());
  Execution execution = Execution::create().value();
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    // Bits that are finite in both formats, a few of them denormal.
    for (uint16_t& bits : x) bits = static_cast<uint16_t>(random() & 0xbbff);
    for (uint16_t& bits : residual) bits = static_cast<uint16_t>(random() & 0xbbff);
    const BucketCodec kernels = BucketCodec::create(codec, bucket.segments).value();
    DeviceArray<std::byte> table(kernels.table());
    DeviceArray<uint16_t> x_dev{std::span<const uint16_t>(x)};
    DeviceArray<uint16_t> residual_dev{std::span<const uint16_t>(residual)};
    DeviceArray<std::byte> payloads(kernels.payloads_size() + 1);
    DeviceArray<EncodedSegment> encoded(bucket.segments.size());
    DeviceArray<std::byte> scratch(kernels.encode_scratch_size());
    const Status status = kernels.encode({.table_dev = table.data(),
                                          .dtype = dtype,
                                          .x_dev = x_dev.data(),
                                          .residual_type = ResidualType::kBfloat16,
                                          .residual_dev = residual_dev.data(),
                                          .draw = kDraw,
                                          .payloads_dev = payloads.data() + 1,
                                          .encoded_dev = encoded.data(),
                                          .scratch_dev = scratch.data()},
                                         nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    for (size_t i = 0; i < bucket.segments.size(); ++i) {
      std::vector<std::byte> payload(codec->max_payload_size(bucket.segments[i].n));
      const uint64_t size =
          codec
              ->encode(InputView(dtype, bucket.of(i, x)), ResidualView(bucket.of(i, residual)),
                       draw_of(bucket.segments[i]), payload, execution)
              .value();
      ASSERT_EQ(encoded.read()[i].size, size);
      const std::vector<std::byte> bytes = payloads.read();
      EXPECT_TRUE(std::equal(payload.begin(), payload.begin() + static_cast<ptrdiff_t>(size),
                             bytes.data() + 1 + kernels.payload_offset(i)));
    }
    EXPECT_EQ(residual_dev.read(), residual);
  }
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, BucketCodecTest, testing::ValuesIn(kBucketCodecs));

}  // namespace
}  // namespace gradwire::cuda
