#pragma once

// A bucket of segments with values, encoded and decoded on the device, for tests.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "cuda/device_memory.h"
#include "gradwire/codec.h"
#include "gradwire/cuda.h"
#include "gradwire/execution.h"

namespace gradwire::cuda {

// Every codec that has kernels, with the parameters that change what they do.
inline const char* const kBucketCodecs[] = {"raw",
                                            "bf16",
                                            "fp16",
                                            "int8",
                                            "int8:bucket=3",
                                            "int8:bucket=1000",
                                            "int8:bucket=50000",
                                            "onebit",
                                            "onebit:bucket=8",
                                            "onebit:bucket=5128",
                                            "onebit:bucket=40968",
                                            "3lc:coder=none",
                                            "3lc:s=1.75",
                                            "3lc:coder=rice",
                                            "3lc:coder=rice,bucket=5",
                                            "3lc:s=1.9,bucket=1000",
                                            "3lc:coder=none,bucket=50000",
                                            "terngrad",
                                            "terngrad:clip=0,pack=trits5,coder=rice",
                                            "terngrad:bucket=640",
                                            "stoch3",
                                            "stoch3:coder=zre,bucket=960",
                                            "stoch3:coder=rice,bucket=49920",
                                            "stc",
                                            "stc:density=0.6,coder=zre",
                                            "qsgd",
                                            "qsgd:bits=2,norm=l2,bucket=1000",
                                            "qsgd:bits=3,bucket=8",
                                            "qsgd:levels=90,norm=l2,bucket=50000",
                                            "qsgd:bits=8,bucket=4294967288",
                                            "qsgd:coder=elias,bits=2",
                                            "qsgd:coder=elias,levels=127,norm=l2,ef=on",
                                            "qsgd:coder=elias-dense,bits=3",
                                            "qsgd:coder=elias-dense,levels=127,bucket=1000",
                                            "inceptionn",
                                            "inceptionn:bound=8,mode=strict,ef=on",
                                            "inceptionn:bound=6",
                                            "topk",
                                            "topk:ratio=0.3,values=bf16",
                                            "topk:ratio=0.01,index=rice",
                                            "topk:ratio=0.9,index=rice,values=bf16"};

// Values distributed like gradients; a larger power gives longer tails.
inline std::vector<float> draw_values(uint64_t n, float power, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) {
    value = std::copysign(std::pow(std::fabs(normal(random)), power), normal(random));
  }
  return values;
}

struct Bucket {
  std::vector<BucketSegment> segments;
  std::vector<float> x;
  std::vector<float> residual;  // or empty

  // `gap` floats lie before each segment, so that segments begin at odd places.
  explicit Bucket(const std::vector<uint64_t>& lengths, uint64_t gap = 1) {
    uint64_t end = 0;
    for (uint64_t n : lengths) {
      segments.push_back({.offset = end + gap, .n = n, .stream = segments.size()});
      end += gap + n;
    }
    x.resize(end);
  }

  void draw(float power, bool with_residual, uint32_t seed) {
    x = draw_values(x.size(), power, seed);
    residual = draw_values(with_residual ? x.size() : 0, 1.0f, seed + 1);
    for (float& r : residual) r *= 0.25f;
  }

  template <typename T>
  [[nodiscard]] std::span<T> of(size_t segment, std::vector<T>& all) const {
    if (all.empty()) return {};
    return std::span<T>(all).subspan(segments[segment].offset, segments[segment].n);
  }
};

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

struct DeviceDecoded {
  std::vector<DecodedSegment> segments;
  std::vector<float> out;
};

// Decodes payloads that lie back to back, and so at any addresses. Each segment may have several
// payloads, one for each source.
inline DeviceDecoded decode_on_device(const std::shared_ptr<const Codec>& codec,
                                      const Bucket& bucket,
                                      const std::vector<std::vector<std::byte>>& payloads,
                                      DecodeMode mode, float onto, float divisor = 0) {
  std::vector<std::byte> bytes(1);
  std::vector<PayloadPlace> places;
  for (const std::vector<std::byte>& payload : payloads) {
    places.push_back({bytes.size(), payload.size()});
    bytes.insert(bytes.end(), payload.begin(), payload.end());
  }
  const auto sources =
      static_cast<uint32_t>(bucket.segments.empty() ? 1 : payloads.size() / bucket.segments.size());
  const BucketCodec kernels = BucketCodec::create(codec, bucket.segments).value();
  DeviceArray<std::byte> table(kernels.table());
  DeviceArray<std::byte> payloads_dev{std::span<const std::byte>(bytes)};
  DeviceArray<PayloadPlace> places_dev{std::span<const PayloadPlace>(places)};
  DeviceArray<float> out{std::span<const float>(std::vector<float>(bucket.x.size(), onto))};
  DeviceArray<DecodedSegment> decoded(payloads.size());
  DeviceArray<std::byte> scratch(kernels.decode_scratch_size(sources));
  const Status status = kernels.decode({.table_dev = table.data(),
                                        .payloads_dev = payloads_dev.data(),
                                        .places_dev = places_dev.data(),
                                        .sources = sources,
                                        .out_dev = out.data(),
                                        .mode = mode,
                                        .divisor = divisor,
                                        .decoded_dev = decoded.data(),
                                        .scratch_dev = scratch.data()},
                                       nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
  return {decoded.read(), out.read()};
}

}  // namespace gradwire::cuda
