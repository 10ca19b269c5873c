#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "gradwire/codec.h"
#include "gradwire/execution.h"
#include "stages/float_clip/float_clip.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

std::vector<std::byte> encode(const Codec& codec, const std::vector<float>& x) {
  Execution execution = Execution::create().value();
  std::vector<std::byte> payload(codec.max_payload_size(x.size()));
  Result<uint64_t> size = codec.encode(x, {}, {}, payload, execution);
  EXPECT_TRUE(size.ok()) << size.status().message();
  payload.resize(size.value());
  return payload;
}

std::vector<float> decode(const Codec& codec, const std::vector<std::byte>& payload, uint64_t n) {
  Execution execution = Execution::create().value();
  std::vector<float> out(n, 7.0f);
  const Status status = codec.decode(payload, out, DecodeMode::kStore, execution);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

std::vector<uint32_t> bits_of_values(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

// Values from 2^-14 to 4, evenly distributed in the exponent, and values at the edges of the
// classes.
std::vector<float> all_sizes(size_t n) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> logarithm(-14.0f, 2.0f);
  std::vector<float> x(n);
  for (float& value : x) value = std::exp2(logarithm(random)) * (random() % 2 == 0 ? 1.0f : -1.0f);
  for (int exponent = -14; exponent <= 2; ++exponent) {
    const float edge = std::ldexp(1.0f, exponent);
    for (float value : {edge, std::nextafter(edge, 0.0f), std::nextafter(edge, 9.0f)}) {
      x.push_back(value);
      x.push_back(-value);
    }
  }
  return x;
}

constexpr int kBounds[] = {10, 8, 6};

std::string spec_of(int bound, ClipMode mode) {
  return "inceptionn:bound=" + std::to_string(bound) +
         (mode == ClipMode::kStrict ? ",mode=strict" : "");
}

TEST(Inceptionn, SamplePayload) {
  const auto codec = Codec::parse("inceptionn").value();
  const std::vector<float> x = {0.5f, -0.75f, 0.1f, 0.03f, -0.0099f, 0.0009f, 1.0f, 0.0f, -2.0f};
  const auto payload = encode(*codec, x);
  const std::vector<uint8_t> want = {0x6a, 0x31,                          // 2 2 2 1, 1 0 3 0
                                     0x00, 0x40, 0x00, 0xe0, 0xcc, 0x0c,  // 16 bits each
                                     0x03, 0x81,                          // 8 bits each
                                     0x00, 0x00, 0x80, 0x3f,              // 1.0
                                     0x03, 0x00, 0x00, 0x00, 0x00, 0xc0};
  std::vector<uint8_t> bytes;
  for (std::byte b : payload) bytes.push_back(static_cast<uint8_t>(b));
  EXPECT_EQ(bytes, want);
  EXPECT_EQ(decode(*codec, payload, x.size()),
            (std::vector<float>{0.5f, -0.75f, 3276.0f / 32768, 3.0f / 128, -1.0f / 128, 0.0f, 1.0f,
                                0.0f, -2.0f}));
}

TEST(Inceptionn, StrictErrorsStayBelowTheBound) {
  const std::vector<float> x = all_sizes(100000);
  for (int bound : kBounds) {
    const auto codec = Codec::parse(spec_of(bound, ClipMode::kStrict)).value();
    const auto decoded = decode(*codec, encode(*codec, x), x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_LT(std::fabs(x[i] - decoded[i]), std::ldexp(1.0f, -bound)) << bound << " " << x[i];
    }
  }
}

TEST(Inceptionn, PaperErrorsStayBelowTheBoundOr128th) {
  const std::vector<float> x = all_sizes(100000);
  for (int bound : kBounds) {
    const auto codec = Codec::parse(spec_of(bound, ClipMode::kPaper)).value();
    const auto decoded = decode(*codec, encode(*codec, x), x.size());
    float largest = 0.0f;
    for (size_t i = 0; i < x.size(); ++i) {
      largest = std::max(largest, std::fabs(x[i] - decoded[i]));
    }
    EXPECT_LT(largest, std::ldexp(1.0f, -std::min(bound, 7)));
    EXPECT_GT(largest, std::ldexp(0.99f, -std::min(bound, 7))) << "the 8-bit class has such errors";
  }
}

// Values are truncated towards 0, never rounded: in the class of 16 bits by less than 2^-15.
TEST(Inceptionn, MagnitudesNeverGrow) {
  const std::vector<float> x = all_sizes(100000);
  for (int bound : kBounds) {
    const auto codec = Codec::parse(spec_of(bound, ClipMode::kPaper)).value();
    const auto decoded = decode(*codec, encode(*codec, x), x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_LE(std::fabs(decoded[i]), std::fabs(x[i]));
      ASSERT_GE(decoded[i] * x[i], 0.0f);
      if (std::fabs(x[i]) >= 1.0f) {
        ASSERT_EQ(decoded[i], x[i]);
      }
      if (std::fabs(x[i]) >= 0.125f) {
        ASSERT_LT(std::fabs(x[i] - decoded[i]), 0x1p-15f);
      }
    }
  }
}

// Encoding decoded values loses nothing more. In strict mode the bytes stay the same too. In paper
// mode a code of 8 bits may have become a zero, which then takes no bits.
TEST(Inceptionn, IsIdempotent) {
  const std::vector<float> x = all_sizes(100000);
  for (int bound : kBounds) {
    for (ClipMode mode : {ClipMode::kPaper, ClipMode::kStrict}) {
      const auto codec = Codec::parse(spec_of(bound, mode)).value();
      const auto payload = encode(*codec, x);
      const auto once = decode(*codec, payload, x.size());
      const auto again = encode(*codec, once);
      EXPECT_EQ(decode(*codec, again, x.size()), once) << spec_of(bound, mode);
      if (mode == ClipMode::kStrict) {
        EXPECT_EQ(again, payload) << bound;
      }
      const auto twice = decode(*codec, again, x.size());
      EXPECT_EQ(encode(*codec, twice), again) << spec_of(bound, mode);
    }
  }
}

TEST(Inceptionn, WithoutAResidualCarriesNonFiniteValuesAsTheyAre) {
  using limits = std::numeric_limits<float>;
  const auto codec = Codec::parse("inceptionn:bound=6").value();
  const std::vector<float> x = {limits::quiet_NaN(),
                                limits::infinity(),
                                -limits::infinity(),
                                limits::max(),
                                std::bit_cast<float>(0xff800001u),
                                1.0f,
                                -0.0f,
                                limits::denorm_min()};
  const auto decoded = decode(*codec, encode(*codec, x), x.size());
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(decoded[i]), std::bit_cast<uint32_t>(x[i])) << i;
  }
  EXPECT_EQ(bits_of_values({decoded[6], decoded[7]}), (std::vector<uint32_t>{0, 0}));
}

TEST(Inceptionn, ZerosTakeTwoBitsAValue) {
  const auto codec = Codec::parse("inceptionn").value();
  EXPECT_EQ(encode(*codec, std::vector<float>(1001, 0.0f)).size(), 126 * 2);
  EXPECT_TRUE(encode(*codec, {}).empty());
}

// With error feedback the sum of the decoded values follows the sum of the inputs.
TEST(Inceptionn, ErrorFeedbackSendsSmallValuesInTheEnd) {
  Execution execution = Execution::create().value();
  const auto codec = Codec::parse("inceptionn:bound=6,ef=on").value();
  const std::vector<float> x(100, 0.001f);
  std::vector<float> residual(100), sum(100);
  for (int step = 0; step < 1000; ++step) {
    std::vector<std::byte> payload(codec->max_payload_size(x.size()));
    Result<uint64_t> size =
        codec->encode(x, ResidualView(std::span(residual)), {}, payload, execution);
    ASSERT_TRUE(size.ok());
    payload.resize(size.value());
    ASSERT_TRUE(codec->decode(payload, sum, DecodeMode::kAdd, execution).ok());
  }
  for (float value : sum) ASSERT_NEAR(value, 1.0f, 0.016f);
}

TEST(Inceptionn, RefusesSizesThatNoPayloadHas) {
  const auto codec = Codec::parse("inceptionn").value();
  EXPECT_TRUE(codec->check_size(0, 0).ok());
  EXPECT_FALSE(codec->check_size(0, 1).ok());
  EXPECT_TRUE(codec->check_size(9, 4).ok());
  EXPECT_FALSE(codec->check_size(9, 3).ok());
  EXPECT_TRUE(codec->check_size(9, 4 + 36).ok());
  EXPECT_FALSE(codec->check_size(9, 4 + 37).ok());
  EXPECT_TRUE(codec->check_size(40961, 8 + 10242).ok());
  EXPECT_FALSE(codec->check_size(40961, 8 + 10241).ok());
  EXPECT_FALSE(codec->check_size(uint64_t{1} << 40, 1000).ok());
}

TEST(Inceptionn, RefusesSizesOfChunksThatDoNotFit) {
  Execution execution = Execution::create().value();
  const auto codec = Codec::parse("inceptionn").value();
  auto payload = encode(*codec, all_sizes(100000));
  std::vector<float> out(100000 + 102);
  ASSERT_TRUE(codec->decode(payload, out, DecodeMode::kStore, execution).ok());
  payload[0] ^= std::byte{1};  // the size of the first chunk
  EXPECT_EQ(codec->decode(payload, out, DecodeMode::kStore, execution).code(),
            StatusCode::kCorruptPayload);
  payload[4] ^= std::byte{1};  // and that of the second, so that their sum may be right
  EXPECT_EQ(codec->decode(payload, out, DecodeMode::kStore, execution).code(),
            StatusCode::kCorruptPayload);
}

TEST(Inceptionn, ReservedWireBitsAreRefused) {
  for (const uint16_t param_a : std::initializer_list<uint16_t>{0, 1, 2, 4, 5, 6}) {
    EXPECT_TRUE(Codec::from_wire({.id = 7, .param_a = param_a}).ok()) << param_a;
  }
  for (const uint16_t param_a : std::initializer_list<uint16_t>{3, 7, 8, 16, 0x8000}) {
    EXPECT_EQ(Codec::from_wire({.id = 7, .param_a = param_a}).status().code(),
              StatusCode::kReservedBits)
        << param_a;
  }
  EXPECT_EQ(Codec::from_wire({.id = 7, .param_a = 0, .param_b = 1}).status().code(),
            StatusCode::kReservedBits);
}

// The counts of one thread of the test below, for one bound and mode.
struct Seen {
  uint64_t count[4] = {};       // values of each tag
  float largest_error[4] = {};  // of the values below 1
  uint64_t changed = 0;         // values from 1 on that changed
  uint64_t grown = 0;           // magnitudes that grew, signs that changed
};

void look_at(const float* x, const float* decoded, size_t n, const FloatClip& clip, Seen& seen) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t tag = clip_tag(x[i], clip);
    ++seen.count[tag];
    if (tag == kClip32) {
      seen.changed += bits_of(x[i]) != bits_of(decoded[i]);
      continue;
    }
    seen.largest_error[tag] = std::max(seen.largest_error[tag], std::fabs(x[i] - decoded[i]));
    const bool sign_changed = tag != kClipNone && std::signbit(x[i]) != std::signbit(decoded[i]);
    seen.grown += std::fabs(decoded[i]) > std::fabs(x[i]) || sign_changed;
  }
}

// This test is long: run it by hand on an idle machine.
TEST(Inceptionn, DISABLED_All32BitFloats) {
  constexpr size_t kBlock = size_t{1} << 15;
  constexpr size_t kBlocks = (uint64_t{1} << 32) / kBlock;
  const Kernels& kernels = *find_kernels("auto");
  for (ClipMode mode : {ClipMode::kPaper, ClipMode::kStrict}) {
    for (int bound : kBounds) {
      const FloatClip clip = float_clip(bound, mode);
      std::vector<Seen> seen(std::max(1u, std::thread::hardware_concurrency()));
      std::atomic<size_t> next{0};
      std::atomic<uint64_t> refused{0};
      std::vector<std::thread> threads;
      for (Seen& mine : seen) {
        threads.emplace_back([&] {
          std::vector<float> x(kBlock), decoded(kBlock);
          std::vector<uint8_t> bursts(kBlock / kBurstValues * kMaxBurstSize);
          for (size_t block = next++; block < kBlocks; block = next++) {
            for (size_t i = 0; i < kBlock; ++i) {
              x[i] = float_of(static_cast<uint32_t>(block * kBlock + i));
            }
            const size_t size = kernels.float_clip_encode(x.data(), kBlock, clip, bursts.data());
            refused += !kernels.float_clip_decode(bursts.data(), size, kBlock, decoded.data(),
                                                  DecodeMode::kStore);
            look_at(x.data(), decoded.data(), kBlock, clip, mine);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      Seen all;
      for (const Seen& one : seen) {
        all.changed += one.changed;
        all.grown += one.grown;
        for (int tag = 0; tag < 4; ++tag) {
          all.count[tag] += one.count[tag];
          all.largest_error[tag] = std::max(all.largest_error[tag], one.largest_error[tag]);
        }
      }
      std::cout << spec_of(bound, mode);
      for (int tag = 0; tag < 4; ++tag) {
        std::cout << "  tag " << tag << ": " << all.count[tag] << " values";
        if (tag < 3) std::cout << ", error " << std::hexfloat << all.largest_error[tag];
      }
      std::cout << std::defaultfloat << std::endl;
      EXPECT_EQ(refused, 0u);
      EXPECT_EQ(all.changed, 0u);
      EXPECT_EQ(all.grown, 0u);
      const float limit = std::ldexp(1.0f, -bound);
      EXPECT_LT(all.largest_error[kClipNone], limit);
      EXPECT_LT(all.largest_error[kClip8], mode == ClipMode::kStrict ? limit : 0x1p-7f);
      EXPECT_LT(all.largest_error[kClip16], 0x1p-15f);
    }
  }
}

}  // namespace
}  // namespace gradwire
