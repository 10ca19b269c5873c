// Payloads that no encoder writes: the device decodes or refuses them as the CPU does.

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "cuda/bucket.h"

namespace gradwire::cuda {
namespace {

using Payload = std::vector<std::byte>;

Payload bytes_of(std::initializer_list<int> bytes) {
  Payload payload;
  for (int byte : bytes) payload.push_back(static_cast<std::byte>(byte));
  return payload;
}

// A unit and the bytes after it.
Payload with_unit(float unit, std::initializer_list<int> coded) {
  Payload payload(sizeof unit);
  std::memcpy(payload.data(), &unit, sizeof unit);
  const Payload codes = bytes_of(coded);
  payload.insert(payload.end(), codes.begin(), codes.end());
  return payload;
}

struct Case {
  const char* codec;
  uint64_t n;
  Payload fine;  // valid; each payload of `refused` has one fault
  std::vector<Payload> refused;
};

// The comments list what is wrong with each payload, in order.
std::vector<Case> cases() {
  std::vector<Case> all;
  // Three levels of 2 bits, s = 1. Faults: a negative unit, all units 0, an infinite unit; a level
  // 2; padding.
  all.push_back({"qsgd:bits=2",
                 3,
                 with_unit(1.0f, {0b100001}),
                 {with_unit(-1.0f, {0b100001}), with_unit(0.0f, {0b100001}),
                  with_unit(std::numeric_limits<float>::infinity(), {0b100001}),
                  with_unit(1.0f, {0b110001}), with_unit(1.0f, {0b1100001})}});
  // s times the unit is too large.
  all.push_back({"qsgd:bits=3", 1, with_unit(0x1p126f, {1}), {with_unit(0x1p127f, {1})}});
  // Distance 1, +, level 1, distance 2 to the end. Faults: padding; distance 3; an extra byte; a
  // level 2; a distance beyond any chunk.
  all.push_back({"qsgd:bits=2,coder=elias",
                 2,
                 with_unit(1.0f, {0b00010000}),
                 {with_unit(1.0f, {0b00010001}), with_unit(1.0f, {0b00011000}),
                  with_unit(1.0f, {0b00010000, 0}), with_unit(1.0f, {0b00100100}),
                  with_unit(1.0f, {0b11110000})}});
  // 1, + and 0. Faults: padding; an extra byte; a level 2.
  all.push_back({"qsgd:bits=2,coder=elias-dense",
                 2,
                 with_unit(1.0f, {0b10000000}),
                 {with_unit(1.0f, {0b10000001}), with_unit(1.0f, {0b10000000, 0}),
                  with_unit(1.0f, {0b11000000})}});
  // A tag of 8 bits, and its code. Faults: no code; an extra byte; the tag of a missing value,
  // alone and beside the other; an empty payload.
  all.push_back({"inceptionn",
                 1,
                 bytes_of({1, 0, 64}),
                 {bytes_of({1, 0}), bytes_of({1, 0, 64, 0}), bytes_of({4, 0, 64}),
                  bytes_of({5, 0, 64, 64}), Payload()}});
  // A map and one value. Faults: half a value; bits after the last value, beside the other and
  // alone; two values; no value.
  all.push_back({"topk:values=bf16",
                 3,
                 bytes_of({2, 0, 64}),
                 {bytes_of({2, 0}), bytes_of({10, 0, 64, 0, 64}), bytes_of({8, 0, 64}),
                  bytes_of({6, 0, 64}), bytes_of({0})}});
  // An index of packed trits, because gaps would not be smaller: 0, +1, 0. Faults: a trit -1, and a
  // trit after the last, beside the +1; no trits; two bytes instead of one; a value that the index
  // does not name; an index that is longer than the payload.
  all.push_back(
      {"topk:index=rice,values=bf16",
       3,
       bytes_of({1, 0, 148, 0, 64}),
       {bytes_of({1, 0, 175, 0, 64}), bytes_of({1, 0, 151, 0, 64}), bytes_of({1, 0, 243}),
        bytes_of({2, 0, 148, 0, 64}), bytes_of({1, 0, 121, 0, 64}), bytes_of({9, 0, 148, 0, 64})}});
  // Values that adding to 0 would change: -0.0, a signalling NaN, and a trit -1 times a scale of 0.
  all.push_back({"topk", 3, bytes_of({6, 0, 0, 0, 128, 1, 0, 128, 127}), {}});
  all.push_back({"topk:values=bf16", 3, bytes_of({6, 0, 128, 129, 127}), {}});
  // Scales 0 and 4; in Golomb-Rice code k = 0, no gap, -1.
  all.push_back({"3lc:coder=rice,bucket=5", 10, bytes_of({0, 0, 0, 0, 0, 0, 128, 64, 48}), {}});
  return all;
}

TEST(ChosenPayloads, AreDecodedOrRefusedAsOnTheCpu) {
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.codec);
    const auto codec = Codec::parse(one.codec).value();
    Execution execution = Execution::create().value();
    std::vector<Payload> payloads = one.refused;
    payloads.insert(payloads.begin(), one.fine);
    const Bucket bucket(std::vector<uint64_t>(payloads.size(), one.n));
    DeviceDecoded decoded = decode_on_device(codec, bucket, payloads, DecodeMode::kStore, 7.0f);
    for (size_t i = 0; i < payloads.size(); ++i) {
      SCOPED_TRACE("payload " + std::to_string(i));
      std::vector<float> out(one.n);
      const Status status = codec->decode(payloads[i], out, DecodeMode::kStore, execution);
      EXPECT_EQ(status.ok(), i == 0) << status.message();
      EXPECT_EQ(decoded.segments[i].valid, i == 0 ? 1u : 0u);
      if (i == 0) {
        EXPECT_TRUE(same_bits(bucket.of(i, decoded.out), out));
      }
    }
  }
}

}  // namespace
}  // namespace gradwire::cuda
