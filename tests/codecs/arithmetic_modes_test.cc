// The host program's settings of arithmetic (flush to zero, rounding, traps) change no byte and no
// value of any codec, with any number of threads.

#include "tests/arithmetic_modes.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gradwire/compressor.h"
#include "gradwire/frame.h"
#include "tests/codecs/inputs.h"
#include "tests/codecs/variants.h"

namespace gradwire {
namespace {

// Denormals among them, and sums with a residual that are; some whose products with a scale are;
// ordinary values, which are rounded; and the largest.
std::vector<std::vector<float>> inputs() {
  std::vector<std::vector<float>> all;
  for (const float scale : {1e-40f, 1e-37f, 1.0f, 1e35f}) {
    for (const uint64_t n : {uint64_t{601}, kChunkValues + 9}) {
      all.push_back(heavy_tailed(n, n));
      for (float& value : all.back()) value *= scale;
    }
  }
  return all;
}

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  if (!values.empty()) std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

// All that three steps make of an input.
struct Made {
  std::string codec;
  std::vector<std::vector<std::byte>> frames;
  std::vector<uint32_t> residual;
  std::vector<uint32_t> scaled_residual;
  std::vector<uint32_t> decoded;
  std::vector<std::vector<uint16_t>> narrow;

  friend bool operator==(const Made&, const Made&) = default;
};

Made make(const std::string& spec, const std::vector<float>& x, const char* target, int threads) {
  Made made;
  Execution execution = Execution::create(target, threads, Threading::kAlways).value();
  const auto codec = Codec::parse(spec).value();
  made.codec = codec->text();
  Compressor compressor = Compressor::create(codec, x.size()).value();
  std::vector<float> sum(x.size());
  for (uint64_t step = 0; step < 3; ++step) {
    made.frames.emplace_back(compressor.max_encoded_size());
    const auto encoded = compressor.encode(x, step, made.frames.back(), execution);
    EXPECT_TRUE(encoded.ok()) << spec << ": " << encoded.status().message();
    made.frames.back().resize(encoded.value().size);
    const Frame frame = parse_frame(made.frames.back()).value();
    EXPECT_TRUE(decode_frame(frame, sum, DecodeMode::kAdd, execution).ok());
  }
  made.decoded = bits_of(sum);
  const Frame last = parse_frame(made.frames.back()).value();
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    made.narrow.emplace_back(x.size());
    EXPECT_TRUE(decode_frame(last, dtype, made.narrow.back(), execution).ok());
  }
  made.residual = bits_of(compressor.residual().values());
  compressor.residual().scale(1.0f / 3);
  made.scaled_residual = bits_of(compressor.residual().values());
  return made;
}

TEST(EveryCodec, SettingsOfArithmeticChangeNothing) {
  const auto all_inputs = inputs();
  std::vector<std::string> specs = codec_variants();
  specs.insert(specs.end(), {"3lc:s=1.1", "topk:ratio=0.1", "topk2bit:density=0.07"});
  for (const std::string& spec : specs) {
    for (const std::vector<float>& x : all_inputs) {
      const Made expected = make(spec, x, "scalar", 1);
      for (const ArithmeticMode::Mode mode : ArithmeticMode::all()) {
        const bool alone = x.size() < kChunkValues;
        const ArithmeticMode set(mode);
        const uint64_t settings = ArithmeticMode::settings();
        ASSERT_TRUE(make(spec, x, alone ? "scalar" : "auto", alone ? 1 : 2) == expected)
            << spec << ", " << ArithmeticMode::name(mode) << ", " << x.size() << " values like "
            << x[0];
        ASSERT_EQ(ArithmeticMode::settings(), settings) << spec;
      }
    }
  }
}

}  // namespace
}  // namespace gradwire
