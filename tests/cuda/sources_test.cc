// Decoding several payloads of each segment gives the bits of decoding them one by one and
// dividing.

#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "cuda/bucket.h"

namespace gradwire::cuda {
namespace {

using Payload = std::vector<std::byte>;

Payload encode(const Codec& codec, const std::vector<float>& values, uint64_t step) {
  Execution execution = Execution::create().value();
  Payload payload(codec.max_payload_size(values.size()));
  payload.resize(codec.encode(values, {}, {.seed = 1, .step = step}, payload, execution).value());
  return payload;
}

// The payloads of each segment, source by source. Some stand for zeros, for which some codecs send
// nothing: the first payload of a sum, one in the middle, and all payloads of a segment.
std::vector<Payload> encode_sources(const Codec& codec, const Bucket& bucket, uint32_t sources) {
  std::vector<Payload> payloads;
  for (uint32_t source = 0; source < sources; ++source) {
    for (size_t i = 0; i < bucket.segments.size(); ++i) {
      const uint64_t n = bucket.segments[i].n;
      const auto seed = static_cast<uint32_t>(payloads.size()) + 1;
      const bool zeros = i == 2 || (i == 3 && source == 0) || (i == 4 && source == 1);
      payloads.push_back(
          encode(codec, zeros ? std::vector<float>(n) : draw_values(n, 2.0f, seed), source));
    }
  }
  return payloads;
}

class SourcesTest : public testing::TestWithParam<const char*> {};

TEST_P(SourcesTest, AreAddedInOrderAndDivided) {
  const auto codec = Codec::parse(GetParam()).value();
  Execution execution = Execution::create().value();
  struct Case {
    uint32_t sources;
    DecodeMode mode;
    float onto;
    float divisor;
    uint64_t last;  // values of the last segment
  };
  for (const Case& one :
       {Case{1, DecodeMode::kStore, 7.0f, 3.0f, 8}, Case{1, DecodeMode::kAdd, -0.0f, 7.0f, 8},
        Case{2, DecodeMode::kAdd, -0.0f, 0.0f, 8}, Case{2, DecodeMode::kStore, 7.0f, 1.0f, 8},
        Case{5, DecodeMode::kStore, 7.0f, 0.0f, 8}, Case{5, DecodeMode::kAdd, 0.3f, 6.0f, 41003}}) {
    SCOPED_TRACE(std::to_string(one.sources) + " over " + std::to_string(one.divisor));
    Bucket bucket({1, 33, 44, 319, 2051, 0, one.last});
    const std::vector<Payload> payloads = encode_sources(*codec, bucket, one.sources);
    const DeviceDecoded decoded =
        decode_on_device(codec, bucket, payloads, one.mode, one.onto, one.divisor);
    std::vector<float> expected(bucket.x.size(), one.onto);
    for (size_t i = 0; i < payloads.size(); ++i) {
      EXPECT_EQ(decoded.segments[i].valid, 1u);
      EXPECT_EQ(decoded.segments[i].empty, payloads[i].empty() ? 1u : 0u);
      const size_t segment = i % bucket.segments.size();
      const DecodeMode mode = i == segment ? one.mode : DecodeMode::kAdd;
      ASSERT_TRUE(codec->decode(payloads[i], bucket.of(segment, expected), mode, execution).ok());
    }
    for (size_t i = 0; i < bucket.segments.size() && one.divisor != 0; ++i) {
      for (float& value : bucket.of(i, expected)) value /= one.divisor;
    }
    EXPECT_TRUE(same_bits(decoded.out, expected));
  }
}

// The middle payload has a changed or an extra byte. Each variant is a segment.
TEST_P(SourcesTest, NameTheCorruptOne) {
  const auto codec = Codec::parse(GetParam()).value();
  Execution execution = Execution::create().value();
  const std::vector<float> values = draw_values(333, 2.0f, 1);
  const Payload fine = encode(*codec, values, 1);
  std::vector<Payload> middle = {fine, {}, fine, fine, fine, fine, fine, fine};
  middle[2].push_back(std::byte{0});
  const size_t last = fine.size() - 1;
  for (size_t i = 3; i < middle.size(); ++i) {
    middle[i][std::vector<size_t>{0, 3, 4, last / 2, last}[i - 3]] = std::byte{0xff};
  }
  std::vector<Payload> payloads(middle.size(), fine);
  payloads.insert(payloads.end(), middle.begin(), middle.end());
  payloads.resize(3 * middle.size(), fine);
  Bucket bucket(std::vector<uint64_t>(middle.size(), values.size()));
  DeviceDecoded decoded = decode_on_device(codec, bucket, payloads, DecodeMode::kStore, 7.0f, 2.0f);
  for (size_t i = 0; i < middle.size(); ++i) {
    SCOPED_TRACE("payload " + std::to_string(i));
    std::vector<float> expected(values.size());
    bool valid = true;
    for (size_t source = 0; source < 3; ++source) {
      const Payload& payload = payloads[source * middle.size() + i];
      const DecodeMode mode = source == 0 ? DecodeMode::kStore : DecodeMode::kAdd;
      const bool own = codec->decode(payload, expected, mode, execution).ok();
      EXPECT_EQ(decoded.segments[source * middle.size() + i].valid, own ? 1u : 0u);
      valid = valid && own;
    }
    if (!valid) continue;
    for (float& value : expected) value /= 2.0f;
    EXPECT_TRUE(same_bits(bucket.of(i, decoded.out), expected));
  }
  EXPECT_EQ(decoded.segments[middle.size() + 2].valid, 0u);
}

// More sources than a block has threads.
TEST(Sources, MayBeMany) {
  for (const char* text : {"3lc:coder=none", "onebit", "raw"}) {
    SCOPED_TRACE(text);
    const auto codec = Codec::parse(text).value();
    const Payload fine = encode(*codec, {1.0f, -2.0f, 0.5f}, 0);
    std::vector<Payload> payloads(300, fine);
    payloads[290] = Payload(fine.size());
    const DeviceDecoded decoded =
        decode_on_device(codec, Bucket({3}), payloads, DecodeMode::kAdd, 1.0f, 300.0f);
    for (size_t i = 0; i < payloads.size(); ++i) {
      EXPECT_EQ(decoded.segments[i].valid, i == 290 && codec->info().name != "raw" ? 0u : 1u) << i;
    }
  }
}

TEST(Sources, AreOneAtLeast) {
  const BucketCodec kernels =
      BucketCodec::create(Codec::parse("raw").value(), Bucket({3}).segments).value();
  const Status status = kernels.decode({.sources = 0}, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, SourcesTest, testing::ValuesIn(kBucketCodecs));

}  // namespace
}  // namespace gradwire::cuda
