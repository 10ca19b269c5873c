// The device decodes and refuses the same payloads as the CPU.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "cuda/bucket.h"

namespace gradwire::cuda {
namespace {

using Payload = std::vector<std::byte>;

Payload encode(const Codec& codec, uint64_t n, float power) {
  Execution execution = Execution::create().value();
  Payload payload(codec.max_payload_size(n));
  const uint64_t size =
      codec.encode(draw_values(n, power, 3), {}, {.seed = 1}, payload, execution).value();
  payload.resize(size);
  return payload;
}

// A payload with changed, missing or additional bytes.
std::vector<Payload> spoil(const Payload& payload) {
  std::vector<Payload> all = {payload, {}, Payload(1), Payload(payload.size())};
  for (size_t more : {1u, 2u, 4u}) {
    all.push_back(payload);
    all.back().resize(payload.size() + more);
    if (payload.size() >= more) all.emplace_back(payload.begin(), payload.end() - more);
  }
  const size_t step = std::max<size_t>(1999, payload.size() / 8);
  for (size_t i = 0; i < payload.size(); ++i) {
    // Change the head, the sizes, some bytes after them, and the end.
    if (i > 24 && i % step != 0 && i + 2 < payload.size()) continue;
    for (int byte : {0x00, 0x01, 0x7f, 0x80, 0xc0, 0xf2, 0xf3, 0xff}) {
      all.push_back(payload);
      all.back()[i] = static_cast<std::byte>(byte);
    }
  }
  return all;
}

// The bits of a NaN may differ (docs/reference/gpu.md).
void forget_nan_bits(std::span<float> values) {
  for (float& value : values) {
    if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
  }
}

class BucketPayloadsTest : public testing::TestWithParam<const char*> {};

// Each spoilt payload as a segment of one bucket.
TEST_P(BucketPayloadsTest, DecodesWhatTheCpuDecodes) {
  const auto codec = Codec::parse(GetParam()).value();
  Execution execution = Execution::create().value();
  for (const uint64_t n : {33u, 41003u}) {
    SCOPED_TRACE(n);
    const std::vector<Payload> payloads = spoil(encode(*codec, n, 3.0f));
    Bucket bucket(std::vector<uint64_t>(payloads.size(), n));
    const DecodeMode mode = n < 100 ? DecodeMode::kStore : DecodeMode::kAdd;
    DeviceDecoded decoded = decode_on_device(codec, bucket, payloads, mode, 0.5f);
    size_t refused = 0;
    for (size_t i = 0; i < payloads.size(); ++i) {
      SCOPED_TRACE("payload " + std::to_string(i));
      std::vector<float> expected(n, 0.5f);
      const Status status = codec->decode(payloads[i], expected, mode, execution);
      EXPECT_EQ(decoded.segments[i].valid, status.ok() ? 1u : 0u) << status.message();
      if (status.ok()) {
        forget_nan_bits(bucket.of(i, decoded.out));
        forget_nan_bits(expected);
        EXPECT_TRUE(same_bits(bucket.of(i, decoded.out), expected));
      }
      refused += status.ok() ? 0 : 1;
    }
    EXPECT_GE(refused, 4u);
    EXPECT_LT(refused, payloads.size());
  }
}

// Frames of raw hold values of any dtype.
TEST(BucketPayloads, RawHoldsHalves) {
  const std::vector<uint16_t> bits = {0x3c00, 0xc000, 0x7e01, 0x0001, 0x8000, 0xfc00, 0x3f80};
  Payload payload(bits.size() * 2);
  std::memcpy(payload.data(), bits.data(), payload.size());
  Bucket bucket({bits.size(), bits.size()});
  Execution execution = Execution::create().value();
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    const auto codec = Codec::from_wire(Codec::parse("raw").value()->wire(), dtype).value();
    std::vector<float> expected(bits.size());
    ASSERT_TRUE(codec->decode(payload, expected, DecodeMode::kStore, execution).ok());
    DeviceDecoded decoded =
        decode_on_device(codec, bucket, {payload, Payload(28)}, DecodeMode::kStore, 2.0f);
    EXPECT_EQ(decoded.segments[0].valid, 1u);
    EXPECT_EQ(decoded.segments[1].valid, 0u);
    EXPECT_TRUE(same_bits(bucket.of(0, decoded.out), expected));
  }
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, BucketPayloadsTest, testing::ValuesIn(kBucketCodecs));

}  // namespace
}  // namespace gradwire::cuda
