#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "gtest/gtest.h"

#include "gradwire/codec.h"

namespace gradwire {
namespace {

std::vector<std::byte> encode(const Codec& codec, const std::vector<float>& x) {
  Execution execution = Execution::create().value();
  std::vector<std::byte> payload(codec.max_payload_size(x.size()));
  const auto size = codec.encode(std::span<const float>(x), {}, {}, payload, execution);
  EXPECT_TRUE(size.ok()) << size.status().message();
  payload.resize(size.value());
  return payload;
}

std::vector<float> decode(const Codec& codec, std::span<const std::byte> payload, size_t n) {
  Execution execution = Execution::create().value();
  std::vector<float> out(n);
  EXPECT_TRUE(codec.decode(payload, out, DecodeMode::kStore, execution).ok());
  return out;
}

// Floats of all exponents.
std::vector<float> any_floats(size_t n) {
  std::mt19937 random(static_cast<uint32_t>(n));
  std::vector<float> x(n);
  for (float& value : x) {
    do {
      value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    } while (!std::isfinite(value));
  }
  return x;
}

TEST(Truncate, CutsTheLowBitsOffEachWordAndSendsTheOthersDensely) {
  for (const auto& [bits, sent] : {std::pair(16u, 16u), {22u, 10u}, {24u, 8u}}) {
    const auto codec = Codec::parse("truncate:bits=" + std::to_string(bits)).value();
    for (size_t n : {1u, 3u, 4u, 31u, 4000u, 40961u, 100003u}) {
      const std::vector<float> x = any_floats(n);
      const std::vector<std::byte> payload = encode(*codec, x);
      EXPECT_EQ(payload.size(), (n * sent + 7) / 8) << bits << " " << n;
      const std::vector<float> decoded = decode(*codec, payload, n);
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(std::bit_cast<uint32_t>(decoded[i]),
                  std::bit_cast<uint32_t>(x[i]) >> bits << bits)
            << bits << " " << n << " " << i;
      }
    }
  }
}

TEST(Truncate, ErrsByTheSharesOfItsPage) {
  for (const auto& [bits, share] : {std::pair(16, 0x1p-7), {22, 1.0 / 3}, {24, 0.75}}) {
    const auto codec = Codec::parse("truncate:bits=" + std::to_string(bits)).value();
    const std::vector<float> x = any_floats(200000);
    const std::vector<float> decoded = decode(*codec, encode(*codec, x), x.size());
    double largest = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::fabs(x[i]) < 0x1p-125f) continue;
      EXPECT_LE(std::fabs(decoded[i]), std::fabs(x[i]));
      largest = std::max(largest, std::fabs(double{x[i]} - decoded[i]) / std::fabs(double{x[i]}));
    }
    EXPECT_LT(largest, share) << bits;
    EXPECT_GT(largest, 0.98 * share) << bits;
  }
}

TEST(Truncate, NoNumberBecomesAnotherKindOfNumber) {
  // With 24 bits an infinity would decode to 2^127, so it is refused like a NaN.
  Execution execution = Execution::create().value();
  for (float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    for (const char* text : {"truncate", "truncate:bits=22", "truncate:bits=24"}) {
      const auto codec = Codec::parse(text).value();
      const std::vector<float> x = {1.0f, bad};
      std::vector<std::byte> payload(codec->max_payload_size(2));
      EXPECT_EQ(
          codec->encode(std::span<const float>(x), {}, {}, payload, execution).status().code(),
          StatusCode::kNonFinite);
      const float largest = decode(*codec, encode(*codec, {-FLT_MAX}), 1)[0];
      EXPECT_TRUE(std::isfinite(largest));
      EXPECT_TRUE(std::signbit(decode(*codec, encode(*codec, {-0.0f}), 1)[0]));
    }
  }
}

}  // namespace
}  // namespace gradwire
