#pragma once

// Inputs of the codecs' tests, and functions that encode and decode them.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "gradwire/codec.h"
#include "gradwire/execution.h"

namespace gradwire {

// Heavy-tailed values, like gradients. They are cut from one long series, because drawing them
// takes longer than the codecs.
inline std::vector<float> heavy_tailed(uint64_t n, uint64_t seed) {
  static const std::vector<float> series = [] {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> values(size_t{1} << 17);
    for (float& value : values) value = normal(random) * std::exp(normal(random));
    return values;
  }();
  std::vector<float> x(n);
  for (uint64_t i = 0; i < n; ++i) x[i] = series[(i + seed * 7919) % series.size()];
  return x;
}

inline std::vector<float> gaussian(uint64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& value : x) value = normal(random);
  return x;
}

// A tensor that is sent once. If the codec keeps a float32 residual, it begins with `before`, or
// with zeros.
struct Sent {
  std::vector<std::byte> payload;
  std::vector<float> decoded;
  std::vector<float> residual;

  Sent(const Codec& codec, const std::vector<float>& x, const DrawContext& draw = {},
       std::vector<float> before = {})
      : payload(codec.max_payload_size(x.size())),
        decoded(x.size(), 7.0f),
        residual(std::move(before)) {
    Execution execution = Execution::create().value();
    residual.resize(x.size());
    const bool feedback = codec.residual_type() != ResidualType::kNone;
    const Result<uint64_t> size = codec.encode(
        x, feedback ? ResidualView(std::span(residual)) : ResidualView(), draw, payload, execution);
    EXPECT_TRUE(size.ok()) << size.status().message();
    payload.resize(size.value());
    EXPECT_TRUE(codec.check_size(x.size(), payload.size()).ok());
    EXPECT_TRUE(codec.decode(payload, decoded, DecodeMode::kStore, execution).ok());
  }
};

inline std::vector<float> decoded_by(const Codec& codec, const std::vector<float>& x,
                                     const DrawContext& draw = {}) {
  return Sent(codec, x, draw).decoded;
}

// The status of decoding a payload whose bytes from `at` on are replaced.
inline StatusCode code_with(const Codec& codec, const Sent& sent, size_t at,
                            const std::vector<int>& bytes) {
  std::vector<std::byte> payload = sent.payload;
  for (size_t i = 0; i < bytes.size(); ++i) payload[at + i] = static_cast<std::byte>(bytes[i]);
  std::vector<float> out(sent.decoded.size());
  Execution execution = Execution::create().value();
  return codec.decode(payload, out, DecodeMode::kStore, execution).code();
}

}  // namespace gradwire
