// Properties of all codecs of the registry, for many sizes, targets and thread counts.

#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gradwire/codec.h"
#include "gradwire/execution.h"
#include "stages/element/bfloat16.h"
#include "tests/codecs/inputs.h"

namespace gradwire {
namespace {

constexpr uint64_t kChunk = 40960;
const std::vector<uint64_t> kSizes = {0,          1,      4,          5,          6,
                                      39,         319,    320,        321,        4095,
                                      kChunk - 1, kChunk, kChunk + 1, 2 * kChunk, 3 * kChunk + 7};

std::vector<std::string> specs() {
  std::vector<std::string> all;
  for (const CodecInfo* info : codecs()) all.emplace_back(info->name);
  for (const char* text : {"bf16:ef=on",
                           "topk:ratio=0.3,values=bf16",
                           "topk:ratio=0.02,index=rice",
                           "topk:ratio=0.9,index=rice,values=bf16",
                           "topk:ratio=0.01,ef=off",
                           "fp16:ef=on,residual=bf16",
                           "int8:bucket=7",
                           "int8:bucket=40961,residual=bf16",
                           "int8:ef=off",
                           "onebit:bucket=8",
                           "onebit:bucket=50000,residual=bf16",
                           "onebit:ef=off",
                           "stoch3:bucket=320",
                           "stoch3:coder=zre,bucket=40960",
                           "stoch3:coder=rice",
                           "terngrad:bucket=320",
                           "terngrad:clip=0",
                           "terngrad:pack=trits5",
                           "terngrad:pack=trits5,coder=zre,clip=1",
                           "terngrad:pack=trits5,coder=rice,bucket=6400",
                           "3lc:s=1.75",
                           "3lc:s=1.9,coder=none",
                           "3lc:bucket=5",
                           "3lc:bucket=320",
                           "3lc:bucket=40960,coder=none",
                           "3lc:bucket=50000",
                           "3lc:residual=bf16",
                           "3lc:ef=off",
                           "3lc:coder=rice",
                           "3lc:s=1.9,coder=rice",
                           "3lc:coder=rice,bucket=5",
                           "3lc:s=1.5,coder=rice,bucket=12345",
                           "3lc:coder=rice,bucket=320,residual=bf16",
                           "stc:density=0.2,coder=zre",
                           "stc:density=0.05,coder=none,residual=bf16",
                           "stc:ef=off",
                           "topk2bit:density=0.5",
                           "topk2bit:density=0.01,residual=bf16",
                           "topk2bit:ef=off",
                           "inceptionn:bound=8,mode=strict",
                           "inceptionn:bound=6,ef=on",
                           "inceptionn:residual=bf16,ef=on",
                           "truncate:bits=22",
                           "truncate:bits=24,ef=on,residual=bf16",
                           "qsgd:bits=2",
                           "qsgd:bits=3,bucket=8",
                           "qsgd:bits=5,norm=l2,bucket=50000",
                           "qsgd:bits=6,ef=on",
                           "qsgd:bits=7,bucket=1000,norm=l2,ef=on,residual=bf16",
                           "qsgd:bits=8",
                           "qsgd:levels=1,coder=elias",
                           "qsgd:levels=1000,ef=on",
                           "qgd:coder=zre",
                           "qgd:coder=none",
                           "qsgd:bits=14,coder=elias-dense",
                           "qsgd:levels=300,coder=elias,norm=l2,bucket=320,ef=on",
                           "qsgd:levels=9,coder=elias,norm=l2,bucket=320,ef=on",
                           "qsgd:coder=elias-dense,bits=8,bucket=104",
                           "qsgd:coder=elias-dense,norm=l2,levels=22,ef=on"}) {
    all.emplace_back(text);
  }
  return all;
}

struct Residuals {
  std::vector<float> f32;
  std::vector<uint16_t> bf16;

  Residuals(const Codec& codec, uint64_t n) {
    if (codec.residual_type() == ResidualType::kFloat32) f32.resize(n);
    if (codec.residual_type() == ResidualType::kBfloat16) bf16.resize(n);
  }
  ResidualView view(const Codec& codec) {
    switch (codec.residual_type()) {
      case ResidualType::kNone:
        return {};
      case ResidualType::kFloat32:
        return ResidualView(std::span(f32));
      case ResidualType::kBfloat16:
        return ResidualView(std::span(bf16));
    }
    return {};
  }
};

std::vector<std::byte> encode(const Codec& codec, const std::vector<float>& x, Residuals& residuals,
                              Execution& execution) {
  std::vector<std::byte> payload(codec.max_payload_size(x.size()));
  Result<uint64_t> size = codec.encode(x, residuals.view(codec), {}, payload, execution);
  EXPECT_TRUE(size.ok()) << size.status().message();
  EXPECT_LE(size.value(), payload.size());
  payload.resize(size.value());
  return payload;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) return false;
  }
  return a.size() == b.size();
}

TEST(EveryCodec, GivesTheSameBytesOnEveryTargetAndAnyThreads) {
  Execution scalar = Execution::create("scalar").value();
  for (const std::string& spec : specs()) {
    const auto codec = Codec::parse(spec).value();
    for (uint64_t n : kSizes) {
      // Two steps, so that the second starts from a residual.
      const std::vector<float> first = heavy_tailed(n, n);
      const std::vector<float> second = heavy_tailed(n, n + 1);
      Residuals expected_residuals(*codec, n);
      encode(*codec, first, expected_residuals, scalar);
      const auto expected = encode(*codec, second, expected_residuals, scalar);
      for (std::string_view target : simd_targets()) {
        for (int threads : {1, 3}) {
          Execution execution = Execution::create(target, threads, Threading::kAlways).value();
          Residuals residuals(*codec, n);
          encode(*codec, first, residuals, execution);
          ASSERT_EQ(encode(*codec, second, residuals, execution), expected)
              << spec << " " << n << " " << target << " " << threads;
          ASSERT_TRUE(same_bits(residuals.f32, expected_residuals.f32)) << spec << " " << target;
          ASSERT_EQ(residuals.bf16, expected_residuals.bf16) << spec << " " << target;
        }
      }
    }
  }
}

TEST(EveryCodec, DecodeAddAddsWhatDecodeGives) {
  for (const std::string& spec : specs()) {
    const auto codec = Codec::parse(spec).value();
    for (uint64_t n : kSizes) {
      const std::vector<float> x = heavy_tailed(n, 3 * n);
      const std::vector<float> sum = heavy_tailed(n, 5 * n);
      for (std::string_view target : simd_targets()) {
        Execution execution = Execution::create(target, 2, Threading::kAlways).value();
        Residuals residuals(*codec, n);
        const auto payload = encode(*codec, x, residuals, execution);
        std::vector<float> decoded(n, std::numeric_limits<float>::quiet_NaN());
        ASSERT_TRUE(codec->decode(payload, decoded, DecodeMode::kStore, execution).ok());
        std::vector<float> added = sum;
        ASSERT_TRUE(codec->decode(payload, added, DecodeMode::kAdd, execution).ok());
        for (uint64_t i = 0; i < n; ++i) ASSERT_EQ(added[i], sum[i] + decoded[i]) << spec;
        if (codec->residual_type() != ResidualType::kFloat32) continue;
        for (uint64_t i = 0; i < n; ++i) ASSERT_EQ(residuals.f32[i], x[i] - decoded[i]) << spec;
      }
    }
  }
}

TEST(EveryCodec, InputPlusOldResidualIsDecodedPlusNewResidual) {
  for (const std::string& spec : specs()) {
    const auto codec = Codec::parse(spec).value();
    if (codec->residual_type() != ResidualType::kFloat32) continue;
    const std::vector<float> x = heavy_tailed(5000, 11);
    std::vector<float> residual = gaussian(5000, 12);
    for (uint64_t step = 0; step < 3; ++step) {
      const std::vector<float> before = residual;
      const Sent sent(*codec, x, {.step = step}, before);
      residual = sent.residual;
      for (uint64_t i = 0; i < x.size(); ++i) {
        ASSERT_EQ(residual[i], (x[i] + before[i]) - sent.decoded[i]) << spec << " " << i;
      }
    }
  }
}

TEST(EveryCodec, NeedsItsWholeRoom) {
  Execution execution = Execution::create().value();
  for (const std::string& spec : specs()) {
    const auto codec = Codec::parse(spec).value();
    const std::vector<float> x = heavy_tailed(1000, 1);
    Residuals residuals(*codec, x.size());
    std::vector<std::byte> payload(codec->max_payload_size(x.size()) - 1);
    EXPECT_EQ(codec->encode(x, residuals.view(*codec), {}, payload, execution).status().code(),
              StatusCode::kBufferTooSmall)
        << spec;
  }
}

TEST(EveryCodec, RefusesAPayloadOfAnotherLength) {
  Execution execution = Execution::create().value();
  for (const std::string& spec : specs()) {
    // The payload's length says where a rice code ends, so another length may be valid.
    if (spec.find("rice") != std::string::npos) continue;
    const auto codec = Codec::parse(spec).value();
    const std::vector<float> x = heavy_tailed(1000, 1);
    Residuals residuals(*codec, x.size());
    auto payload = encode(*codec, x, residuals, execution);
    std::vector<float> out(x.size());
    payload.push_back(std::byte{121});
    EXPECT_EQ(codec->decode(payload, out, DecodeMode::kStore, execution).code(),
              StatusCode::kCorruptPayload)
        << spec;
    payload.resize(payload.size() - 2);
    EXPECT_EQ(codec->decode(payload, out, DecodeMode::kStore, execution).code(),
              StatusCode::kCorruptPayload)
        << spec;
  }
}

// The tolerance covers the rounding of x + residual and of the residual's own type, for values
// below 2^10.
void expect_near(const Residuals& residuals, const Residuals& before, const std::string& spec) {
  for (size_t i = 0; i < before.f32.size(); ++i) {
    ASSERT_NEAR(residuals.f32[i], before.f32[i], 0x1p-12) << spec << " " << i;
  }
  for (size_t i = 0; i < before.bf16.size(); ++i) {
    ASSERT_NEAR(widen_bf16(residuals.bf16[i]), widen_bf16(before.bf16[i]), 4.0) << spec << " " << i;
  }
}

// The residual is exactly the old one if the codec measured the whole segment first. Otherwise it
// is as `restore` leaves it, with the same bits for every target and any number of threads.
TEST(EveryCodec, WithAResidualNamesNonFiniteInputAndKeepsTheResidual) {
  for (const std::string& spec : specs()) {
    const auto codec = Codec::parse(spec).value();
    if (codec->residual_type() == ResidualType::kNone) continue;
    for (float bad :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      Execution scalar = Execution::create("scalar").value();
      const uint64_t n = 2 * kChunk + 100;
      Residuals before(*codec, n);
      encode(*codec, heavy_tailed(n, 1), before, scalar);
      std::vector<float> x = heavy_tailed(n, 2);
      const bool measured = codec->measure(x, before.view(*codec), scalar).value().complete;
      x[kChunk + 7] = bad;
      std::optional<Residuals> expected;
      if (measured) expected = before;
      for (std::string_view target : simd_targets()) {
        for (int threads : {1, 2}) {
          Execution execution = Execution::create(target, threads, Threading::kAlways).value();
          Residuals residuals = before;
          std::vector<std::byte> payload(codec->max_payload_size(n));
          const Status status =
              codec->encode(x, residuals.view(*codec), {}, payload, execution).status();
          EXPECT_EQ(status.code(), StatusCode::kNonFinite) << spec;
          EXPECT_NE(status.message().find("element 40967"), std::string::npos) << status.message();
          EXPECT_EQ(codec->find_non_finite(x, residuals.view(*codec), execution), kChunk + 7);
          if (!expected) {
            expect_near(residuals, before, spec);
            expected = residuals;
          }
          EXPECT_TRUE(same_bits(residuals.f32, expected->f32)) << spec << " " << target;
          EXPECT_EQ(residuals.bf16, expected->bf16) << spec << " " << target;
        }
      }
    }
  }
}

// Exchanges need this when a step fails after some segments were encoded.
TEST(EveryCodec, RestoreUndoesEncode) {
  for (const std::string& spec : specs()) {
    const auto codec = Codec::parse(spec).value();
    const uint64_t n = kChunk + 100;
    const std::vector<float> x = heavy_tailed(n, 2);
    Residuals before(*codec, n);
    Execution scalar = Execution::create("scalar").value();
    encode(*codec, heavy_tailed(n, 1), before, scalar);
    std::optional<Residuals> expected;
    for (std::string_view target : simd_targets()) {
      Execution execution = Execution::create(target, 2, Threading::kAlways).value();
      Residuals residuals = before;
      const auto payload = encode(*codec, x, residuals, execution);
      ASSERT_TRUE(codec->restore(payload, x, residuals.view(*codec), execution).ok()) << spec;
      expect_near(residuals, before, spec);
      if (!expected) expected = residuals;
      EXPECT_TRUE(same_bits(residuals.f32, expected->f32)) << spec << " " << target;
      EXPECT_EQ(residuals.bf16, expected->bf16) << spec << " " << target;
    }
  }
}

// encode alone does the same as the two calls.
TEST(EveryCodec, MeasureAndEncodeGiveTheBytesOfEncode) {
  Execution execution = Execution::create("auto", 2, Threading::kAlways).value();
  for (const std::string& spec : specs()) {
    const auto codec = Codec::parse(spec).value();
    const std::vector<float> x = heavy_tailed(kChunk + 100, 1);
    Residuals at_once(*codec, x.size());
    Residuals in_steps(*codec, x.size());
    const auto expected = encode(*codec, x, at_once, execution);
    const ResidualView residual = in_steps.view(*codec);
    const Measurement measured = codec->measure(x, residual, execution).value();
    std::vector<std::byte> payload(codec->max_payload_size(x.size()));
    payload.resize(codec->encode(x, residual, {}, payload, execution, measured).value());
    EXPECT_EQ(payload, expected) << spec;
    EXPECT_TRUE(same_bits(in_steps.f32, at_once.f32)) << spec;
    EXPECT_EQ(in_steps.bf16, at_once.bf16) << spec;
  }
}

// This is what an exchange does: it adds decoded values to its own, measures each chunk when it is
// complete, encodes the sum and replaces it by the values that the others will decode.
TEST(EveryCodec, WorksChunkByChunkInPlace) {
  for (const int threads : {1, 2}) {
    Execution execution = Execution::create("auto", threads, Threading::kAlways).value();
    for (const std::string& spec : specs()) {
      const auto codec = Codec::parse(spec).value();
      for (const bool zero : {false, true}) {
        const uint64_t n = 2 * kChunk + 100;
        std::vector<float> x = zero ? std::vector<float>(n, -0.0f) : heavy_tailed(n, 1);
        Residuals before(*codec, n);
        const auto pushed = encode(*codec, zero ? x : heavy_tailed(n, 2), before, execution);
        std::vector<float> sum = x;
        ASSERT_TRUE(codec->decode(pushed, sum, DecodeMode::kAdd, execution).ok());
        Residuals expected(*codec, n);
        const auto payload = encode(*codec, sum, expected, execution);
        std::vector<float> decoded(n);
        ASSERT_TRUE(codec->decode(payload, decoded, DecodeMode::kStore, execution).ok());

        Residuals residuals(*codec, n);
        const ResidualView residual = residuals.view(*codec);
        std::vector<Measurement> chunks(codec->measures_chunks(n) ? 3 : 0);
        std::vector<std::atomic<uint64_t>> seen(3);
        const auto measure = [&](uint64_t begin, uint64_t count) {
          seen[begin / kChunk] += count;
          if (chunks.empty()) return;
          chunks[begin / kChunk] = codec->measure_chunk(x, residual, begin, execution);
        };
        ASSERT_TRUE(codec->decode(pushed, x, DecodeMode::kAdd, execution, measure).ok());
        EXPECT_EQ(seen[0] + seen[1] + seen[2], n) << spec;
        EXPECT_EQ(seen[2], 100u) << spec;
        const Measurement measured = codec->measure(x, residual, execution, chunks).value();
        std::vector<float> separate(n, 7.0f);
        const std::span<float> place = measured.complete ? std::span(x) : std::span(separate);
        std::vector<std::byte> sent(codec->max_payload_size(n));
        sent.resize(codec->encode(x, residual, {}, sent, execution, measured, place).value());
        EXPECT_EQ(sent, payload) << spec;
        EXPECT_TRUE(same_bits(std::vector<float>(place.begin(), place.end()), decoded)) << spec;
        EXPECT_TRUE(same_bits(residuals.f32, expected.f32)) << spec;
        EXPECT_EQ(residuals.bf16, expected.bf16) << spec;
      }
    }
  }
}

TEST(ThreeLc, SendsNothingWhereAllIsZero) {
  Execution execution = Execution::create().value();
  for (const char* spec : {"3lc", "3lc:bucket=5", "3lc:coder=none", "3lc:coder=rice"}) {
    const auto codec = Codec::parse(spec).value();
    Residuals residuals(*codec, 1000);
    EXPECT_TRUE(encode(*codec, std::vector<float>(1000, -0.0f), residuals, execution).empty());
    std::vector<float> out(1000, 7.0f);
    ASSERT_TRUE(codec->decode({}, out, DecodeMode::kStore, execution).ok());
    EXPECT_TRUE(same_bits(out, std::vector<float>(1000, 0.0f)));
  }
}

// If the input cancels the residual, nothing is sent and the new residual is 0.
TEST(ThreeLc, AResidualThatTheInputCancelsIsGone) {
  Execution execution = Execution::create().value();
  for (const char* spec :
       {"3lc", "3lc:bucket=5", "3lc:coder=none", "3lc:coder=rice", "3lc:residual=bf16"}) {
    const auto codec = Codec::parse(spec).value();
    Residuals residuals(*codec, 1000);
    std::fill(residuals.f32.begin(), residuals.f32.end(), 2.0f);
    std::fill(residuals.bf16.begin(), residuals.bf16.end(), uint16_t{0x4000});  // 2
    EXPECT_TRUE(encode(*codec, std::vector<float>(1000, -2.0f), residuals, execution).empty());
    for (float left : residuals.f32) ASSERT_EQ(left, 0.0f) << spec;
    for (uint16_t left : residuals.bf16) ASSERT_EQ(left, 0) << spec;
  }
}

TEST(Halves, ASumThatRoundsToInfinityLeavesTheResidual) {
  Execution execution = Execution::create().value();
  const struct {
    const char* spec;
    float largest;  // the largest value that does not round to infinity
  } kCases[] = {{"bf16:ef=on", std::bit_cast<float>(0x7f7f7fffu)},
                {"fp16:ef=on", std::bit_cast<float>(0x477fefffu)}};
  for (const auto& [spec, largest] : kCases) {
    const auto codec = Codec::parse(spec).value();
    Residuals residuals(*codec, 2);
    residuals.f32 = {1.0f, 0.0f};
    std::vector<std::byte> payload(4);
    std::vector<float> x = {0.5f, std::nextafter(largest, std::numeric_limits<float>::infinity())};
    const Status status = codec->encode(x, residuals.view(*codec), {}, payload, execution).status();
    EXPECT_EQ(status.code(), StatusCode::kNonFinite);
    EXPECT_NE(status.message().find("element 1 is too large"), std::string::npos);
    EXPECT_EQ(residuals.f32[0], 1.0f);
    x[1] = largest;
    ASSERT_TRUE(codec->encode(x, residuals.view(*codec), {}, payload, execution).ok());
    EXPECT_TRUE(std::isfinite(residuals.f32[1])) << spec;
  }
}

TEST(Halves, RoundToTheNearest) {
  Execution execution = Execution::create().value();
  const std::vector<float> x = heavy_tailed(10000, 9);
  for (const auto& [spec, unit] : {std::pair{"bf16", 0x1p-8f}, std::pair{"fp16", 0x1p-11f}}) {
    const auto codec = Codec::parse(spec).value();
    Residuals residuals(*codec, x.size());
    std::vector<float> decoded(x.size());
    ASSERT_TRUE(codec
                    ->decode(encode(*codec, x, residuals, execution), decoded, DecodeMode::kStore,
                             execution)
                    .ok());
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_LE(std::fabs(decoded[i] - x[i]), std::max(unit * std::fabs(x[i]), 0x1p-25f)) << spec;
    }
  }
}

// Section 3.1 of the paper: |x - decoded| <= m / 2 < max |x|.
TEST(ThreeLc, ErrorStaysBelowTheLargestMagnitude) {
  Execution execution = Execution::create().value();
  for (const char* spec : {"3lc", "3lc:s=1.5", "3lc:s=1.99"}) {
    const auto codec = Codec::parse(spec).value();
    const std::vector<float> x = heavy_tailed(10000, 9);
    float largest = 0;
    for (float value : x) largest = std::max(largest, std::fabs(value));
    Residuals residuals(*codec, x.size());
    encode(*codec, x, residuals, execution);
    for (float left : residuals.f32) ASSERT_LT(std::fabs(left), largest) << spec;
  }
}

}  // namespace
}  // namespace gradwire
