#include <string>

#include "gtest/gtest.h"

#include "gradwire/codec.h"

namespace gradwire {
namespace {

std::string canonical(const std::string& text) {
  Result<std::shared_ptr<const Codec>> codec = Codec::parse(text);
  return codec.ok()
             ? codec.value()->text()
             : std::string(status_name(codec.status().code())) + ": " + codec.status().message();
}

TEST(CodecParse, CanonicalText) {
  EXPECT_EQ(canonical("raw"), "raw");
  EXPECT_EQ(canonical("bf16"), "bf16");
  EXPECT_EQ(canonical("bf16:ef=on"), "bf16:ef=on");
  EXPECT_EQ(canonical("3lc"), "3lc:s=1");
  EXPECT_EQ(canonical("3lc:s=1.750"), "3lc:s=1.75");
  EXPECT_EQ(canonical("3lc:coder=none,s=1.9"), "3lc:s=1.9,coder=none");
  EXPECT_EQ(canonical("3lc:bucket=500,residual=bf16"), "3lc:s=1,bucket=500,residual=bf16");
  EXPECT_EQ(canonical("3lc:ef=off"), "3lc:s=1,ef=off");
}

TEST(CodecParse, EveryCodecParsesItsOwnText) {
  for (const CodecInfo* info : codecs()) {
    const std::string text = canonical(std::string(info->name));
    EXPECT_EQ(canonical(text), text);
  }
}

TEST(CodecParse, ErrorsListWhatIsValid) {
  const auto expect = [](const std::string& text, const std::string& code,
                         const std::string& part) {
    const std::string message = canonical(text);
    EXPECT_EQ(message.substr(0, code.size()), code) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  std::string names;
  for (const CodecInfo* info : codecs())
    names += (names.empty() ? "" : ", ") + std::string(info->name);
  expect("", "unknown_codec", names);
  expect("4lc", "unknown_codec", names);
  expect("3lc:t=1", "bad_parameter", "coder=zre|none");
  expect("3lc:s", "bad_parameter", "s=[1, 2)");
  expect("3lc:", "bad_parameter", "no parameter ''");
  expect("3lc:s=1,", "bad_parameter", "no parameter ''");
  expect("3lc:s=", "bad_parameter", "[1, 2)");
  expect("3lc:s=1,s=1", "bad_parameter", "twice");
  for (const char* s : {"0.999", "2", "nan", "inf", "-1", "1.5x", "1e9"}) {
    expect(std::string("3lc:s=") + s, "bad_parameter", "[1, 2)");
  }
  expect("3lc:coder=rice", "bad_parameter", "none or zre");
  for (const char* bucket : {"0", "4", "-5", "4294967296", "99999999999999999999"}) {
    expect(std::string("3lc:bucket=") + bucket, "bad_parameter", "multiple of 5");
  }
  expect("3lc:ef=maybe", "bad_parameter", "off or on");
  expect("3lc:residual=f64", "bad_parameter", "f32 or bf16");
  expect("3lc:ef=off,residual=f32", "bad_parameter", "ef=on");
  expect("raw:ef=on", "bad_parameter", "no parameter 'ef'; valid: none");
}

TEST(CodecParse, WireParametersComeBack) {
  for (const char* text : {"raw", "bf16", "3lc", "3lc:s=1.75", "3lc:s=1.9", "3lc:s=1.5,coder=none",
                           "3lc:s=1.25,bucket=1000"}) {
    const auto codec = Codec::parse(text).value();
    const Result<std::shared_ptr<const Codec>> back = Codec::from_wire(codec->wire());
    ASSERT_TRUE(back.ok());
    EXPECT_EQ(back.value()->wire(), codec->wire()) << text;
    EXPECT_EQ(back.value()->text(), codec->text());
  }
}

TEST(CodecParse, ReservedWireBitsAreRefused) {
  EXPECT_EQ(Codec::from_wire({.id = 0}).status().code(), StatusCode::kUnknownCodec);
  EXPECT_EQ(Codec::from_wire({.id = 1, .param_a = 1}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 2, .param_b = 1}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 16, .param_a = 2}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 16, .param_b = 7}).status().code(), StatusCode::kReservedBits);
}

}  // namespace
}  // namespace gradwire
