#include "gradwire/frame.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace gradwire {
namespace {

std::vector<std::byte> make_frame(const std::string& spec, const std::vector<float>& x) {
  const auto codec = Codec::parse(spec).value();
  Execution execution = Execution::create().value();
  std::vector<std::byte> frame(max_frame_size(*codec, x.size()));
  const EncodedFrame encoded = encode_frame(*codec, x, {}, {}, frame, execution).value();
  frame.resize(encoded.size);
  return frame;
}

const std::vector<float> kValues = {1.0f, -3.0f, 0.25f, 2.0f, -0.0f, 1e-30f, 8.0f};

TEST(Frame, RoundTripsEveryCodec) {
  Execution execution = Execution::create().value();
  for (const char* spec : {"raw", "bf16", "3lc:s=1.75", "3lc:coder=none,bucket=5"}) {
    const std::vector<std::byte> bytes = make_frame(spec, kValues);
    const Frame frame = parse_frame(bytes).value();
    EXPECT_EQ(frame.n, kValues.size());
    EXPECT_EQ(frame.codec->text(), Codec::parse(spec).value()->text());
    std::vector<float> out(kValues.size());
    ASSERT_TRUE(decode_frame(frame, out, DecodeMode::kStore, execution).ok());
    EXPECT_GT(out[6], 0.0f);
  }
}

TEST(Frame, TruncatedAtEveryLengthIsRefused) {
  for (const char* spec : {"raw", "bf16", "3lc"}) {
    const std::vector<std::byte> bytes = make_frame(spec, kValues);
    for (size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_EQ(parse_frame(std::span(bytes).first(size)).status().code(), StatusCode::kTruncated)
          << size;
    }
  }
}

TEST(Frame, EveryFlippedBitIsRefused) {
  for (const char* spec : {"raw", "bf16", "3lc"}) {
    std::vector<std::byte> bytes = make_frame(spec, kValues);
    for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      EXPECT_FALSE(parse_frame(bytes).ok()) << spec << " bit " << bit;
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    }
    EXPECT_TRUE(parse_frame(bytes).ok());
  }
}

TEST(Frame, TrailingBytesAreRefused) {
  std::vector<std::byte> bytes = make_frame("3lc", kValues);
  bytes.push_back(std::byte{0});
  EXPECT_EQ(parse_frame(bytes).status().code(), StatusCode::kTrailingBytes);
}

TEST(Frame, NonFiniteInputMakesAMarkerThatDecodesToNan) {
  std::vector<float> x = kValues;
  x[3] = std::numeric_limits<float>::infinity();
  const auto codec = Codec::parse("3lc").value();
  Execution execution = Execution::create().value();
  std::vector<std::byte> bytes(max_frame_size(*codec, x.size()));
  const EncodedFrame encoded = encode_frame(*codec, x, {}, {}, bytes, execution).value();
  EXPECT_EQ(encoded.size, kFrameHeaderSize);
  EXPECT_EQ(encoded.non_finite.code(), StatusCode::kNonFinite);
  EXPECT_NE(encoded.non_finite.message().find("element 3"), std::string::npos);
  bytes.resize(encoded.size);
  const Frame frame = parse_frame(bytes).value();
  EXPECT_EQ(frame.content, FrameContent::kNonFinite);
  std::vector<float> out(x.size());
  for (DecodeMode mode : {DecodeMode::kStore, DecodeMode::kAdd}) {
    std::fill(out.begin(), out.end(), 1.0f);
    ASSERT_TRUE(decode_frame(frame, out, mode, execution).ok());
    for (float value : out) EXPECT_TRUE(std::isnan(value));
  }
}

TEST(Frame, DecodesOnlyIntoItsOwnLength) {
  const std::vector<std::byte> bytes = make_frame("raw", kValues);
  Execution execution = Execution::create().value();
  std::vector<float> out(kValues.size() + 1);
  EXPECT_EQ(decode_frame(parse_frame(bytes).value(), out, DecodeMode::kStore, execution).code(),
            StatusCode::kLengthMismatch);
}

TEST(Frame, DecodesToSixteenBitsRoundedHalfToEven) {
  const std::vector<float> x = {
      1.0f,     1.00390625f, 1.01171875f, 65519.0f,
      65520.0f, -0.0f,       -5.96e-8f,   std::numeric_limits<float>::quiet_NaN()};
  const std::vector<std::byte> bytes = make_frame("raw", x);
  const Frame frame = parse_frame(bytes).value();
  for (int threads : {1, 3}) {
    Execution execution = Execution::create("auto", threads).value();
    std::vector<uint16_t> out(x.size());
    ASSERT_TRUE(decode_frame(frame, Dtype::kBfloat16, out, execution).ok());
    EXPECT_EQ(out, (std::vector<uint16_t>{0x3f80, 0x3f80, 0x3f82, 0x4780, 0x4780, 0x8000, 0xb380,
                                          0x7fc0}));
    ASSERT_TRUE(decode_frame(frame, Dtype::kFloat16, out, execution).ok());
    EXPECT_EQ(out, (std::vector<uint16_t>{0x3c00, 0x3c04, 0x3c0c, 0x7bff, 0x7c00, 0x8000, 0x8001,
                                          0x7e00}));
  }
}

TEST(Frame, RawFramesOfSixteenBitsComeBackBitForBit) {
  std::vector<uint16_t> x(1 << 16);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint16_t>(i);
  const auto codec = Codec::parse("raw").value();
  Execution execution = Execution::create().value();
  std::vector<std::byte> bytes(max_frame_size(*codec, x.size()));
  for (Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    const EncodedFrame encoded =
        encode_frame(*codec, InputView(dtype, x), {}, {}, bytes, execution).value();
    const Frame frame = parse_frame(std::span(bytes).first(encoded.size)).value();
    std::vector<uint16_t> out(x.size());
    ASSERT_TRUE(decode_frame(frame, dtype, out, execution).ok());
    EXPECT_EQ(out, x);
  }
}

TEST(Frame, SixteenBitsAreRefusedForOtherLengthsAndDtypes) {
  const std::vector<std::byte> bytes = make_frame("3lc", kValues);
  const Frame frame = parse_frame(bytes).value();
  Execution execution = Execution::create().value();
  std::vector<uint16_t> out(kValues.size());
  EXPECT_EQ(decode_frame(frame, Dtype::kFloat32, out, execution).code(),
            StatusCode::kUnsupportedDtype);
  out.pop_back();
  EXPECT_EQ(decode_frame(frame, Dtype::kFloat16, out, execution).code(),
            StatusCode::kLengthMismatch);
}

}  // namespace
}  // namespace gradwire
