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
  EXPECT_EQ(canonical("fp16:ef=on,residual=bf16"), "fp16:ef=on,residual=bf16");
  EXPECT_EQ(canonical("int8:bucket=1"), "int8:bucket=1");
  EXPECT_EQ(canonical("stoch3:ef=off"), "stoch3");
  EXPECT_EQ(canonical("stoch3:bucket=320,coder=zre"), "stoch3:coder=zre,bucket=320");
  EXPECT_EQ(canonical("terngrad:clip=2.5,pack=2bit,coder=none"), "terngrad");
  EXPECT_EQ(canonical("terngrad:clip=0.0,bucket=320"), "terngrad:clip=0,bucket=320");
  EXPECT_EQ(canonical("terngrad:coder=rice,pack=trits5,ef=off"), "terngrad:pack=trits5,coder=rice");
  EXPECT_EQ(canonical("3lc"), "3lc:s=1");
  EXPECT_EQ(canonical("3lc:s=1.750"), "3lc:s=1.75");
  EXPECT_EQ(canonical("3lc:coder=none,s=1.9"), "3lc:s=1.9,coder=none");
  EXPECT_EQ(canonical("3lc:bucket=500,residual=bf16"), "3lc:s=1,bucket=500,residual=bf16");
  EXPECT_EQ(canonical("3lc:ef=off"), "3lc:s=1,ef=off");
  EXPECT_EQ(canonical("inceptionn:mode=paper,bound=10"), "inceptionn");
  EXPECT_EQ(canonical("inceptionn:mode=strict,bound=8"), "inceptionn:bound=8,mode=strict");
  EXPECT_EQ(canonical("truncate:bits=16"), "truncate");
  EXPECT_EQ(canonical("truncate:ef=on,bits=22"), "truncate:bits=22,ef=on");
  EXPECT_EQ(canonical("inceptionn:mode=strict,ef=on"), "inceptionn:mode=strict,ef=on");
  EXPECT_EQ(canonical("qsgd:bits=4,bucket=512,norm=max,coder=fixed"), "qsgd");
  EXPECT_EQ(canonical("qsgd:levels=31,ef=on"), "qsgd:bits=6,ef=on");
  EXPECT_EQ(canonical("qsgd:levels=8191"), "qsgd:bits=14");
  EXPECT_EQ(canonical("qsgd:levels=1000"), "qsgd:levels=1000");
  EXPECT_EQ(canonical("qsgd:coder=elias-dense,norm=l2,bucket=64,levels=20"),
            "qsgd:levels=20,bucket=64,norm=l2,coder=elias-dense");
}

TEST(CodecParse, NamesStandForCodecs) {
  EXPECT_EQ(canonical("small"), "3lc:s=1,coder=rice");
  EXPECT_EQ(canonical("safe"), "int8:bucket=256");
  EXPECT_EQ(canonical("half-byte"), "qsgd");
  EXPECT_EQ(canonical("safe:ef=off"), "int8:bucket=256,ef=off");
  for (const CodecName& known : codec_names()) {
    EXPECT_EQ(spell_out_codec(known.name), known.codec);
    EXPECT_EQ(canonical(std::string(known.name)), canonical(std::string(known.codec)));
    for (const CodecInfo* info : codecs()) EXPECT_NE(known.name, info->name);
  }
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
  expect("3lc:t=1", "bad_parameter", "coder=zre|rice|none");
  expect("3lc:s", "bad_parameter", "s=[1, 2)");
  expect("3lc:", "bad_parameter", "no parameter ''");
  expect("3lc:s=1,", "bad_parameter", "no parameter ''");
  expect("3lc:s=", "bad_parameter", "[1, 2)");
  expect("3lc:s=1,s=1", "bad_parameter", "twice");
  for (const char* s : {"0.999", "2", "nan", "inf", "-1", "1.5x", "1e9"}) {
    expect(std::string("3lc:s=") + s, "bad_parameter", "[1, 2)");
  }
  expect("3lc:coder=fse", "bad_parameter", "none, zre or rice");
  for (const char* bucket : {"0", "4", "-5", "4294967296", "99999999999999999999"}) {
    expect(std::string("3lc:bucket=") + bucket, "bad_parameter", "multiple of 5");
  }
  expect("terngrad:coder=zre", "bad_parameter", "pack=trits5");
  expect("terngrad:clip=16", "bad_parameter", "[0, 16)");
  expect("terngrad:bucket=5", "bad_parameter", "multiple of 320");
  expect("stoch3:bucket=322", "bad_parameter", "multiple of 320");
  expect("onebit:bucket=7", "bad_parameter", "multiple of 8");
  expect("int8:bucket=0", "bad_parameter", "a whole number from 1 to 4294967295");
  expect("topk:ratio=1.01", "bad_parameter", "[0.0001, 1]");
  expect("inceptionn:bound=7", "bad_parameter", "10, 8 or 6");
  expect("truncate:bits=8", "bad_parameter", "16, 22 or 24");
  expect("inceptionn:mode=loose", "bad_parameter", "paper or strict");
  expect("qsgd:bits=1", "bad_parameter", "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 or 14");
  expect("qsgd:levels=8192", "bad_parameter", "from 1 to 8191");
  expect("qsgd:bits=4,levels=7", "bad_parameter", "not both");
  expect("qsgd:bucket=12", "bad_parameter", "multiple of 8");
  expect("qsgd:coder=rice", "bad_parameter", "fixed, elias or elias-dense");
  expect("qsgd:norm=l1", "bad_parameter", "max or l2");
  expect("3lc:ef=maybe", "bad_parameter", "off or on");
  expect("3lc:residual=f64", "bad_parameter", "f32 or bf16");
  expect("3lc:ef=off,residual=f32", "bad_parameter", "ef=on");
  expect("raw:ef=on", "bad_parameter", "no parameter 'ef'; valid: none");
}

TEST(CodecParse, RefusesErrorFeedbackThatGrowsWithoutBound) {
  const auto refused = [](const std::string& text) {
    const Status status = Codec::parse(text).status();
    if (status.ok()) return false;
    EXPECT_EQ(status.code(), StatusCode::kBadParameter) << text;
    EXPECT_NE(status.message().find("without bound; leave ef out, or take "), std::string::npos)
        << status.message();
    return true;
  };
  for (const char* text : {"stoch3:ef=on", "terngrad:ef=on", "terngrad:clip=1,ef=on",
                           "qsgd:bits=2,ef=on", "qsgd:levels=1,norm=l2,bucket=8,ef=on"}) {
    EXPECT_TRUE(refused(text)) << text;
  }
  // With norm=l2 a group has less than 4 s^2 values; the smallest groups have 8.
  for (int s = 2; s <= 127; ++s) {
    const auto text = [s](int bucket, const char* norm) {
      return "qsgd:levels=" + std::to_string(s) + ",bucket=" + std::to_string(bucket) +
             ",norm=" + norm + ",ef=on";
    };
    const int largest = (4 * s * s - 1) / 8 * 8;
    EXPECT_FALSE(refused(text(largest, "l2"))) << s;
    EXPECT_TRUE(refused(text(largest + 8, "l2"))) << s;
    EXPECT_FALSE(refused(text(largest + 8, "max"))) << s;
  }
  EXPECT_TRUE(Codec::parse("qsgd:levels=2,norm=l2").ok()) << "no residual, so no growth";
}

TEST(CodecParse, WireParametersComeBack) {
  for (const char* text : {"raw",
                           "bf16",
                           "fp16",
                           "int8",
                           "int8:bucket=77",
                           "onebit",
                           "onebit:bucket=800",
                           "stoch3",
                           "stoch3:coder=rice,bucket=640",
                           "terngrad",
                           "terngrad:clip=0,pack=trits5",
                           "terngrad:clip=2.345,pack=trits5,coder=zre,bucket=320",
                           "3lc",
                           "3lc:s=1.75",
                           "3lc:s=1.9",
                           "3lc:s=1.5,coder=none",
                           "3lc:s=1.25,bucket=1000",
                           "3lc:s=1.75,coder=rice",
                           "inceptionn",
                           "inceptionn:bound=6,mode=strict",
                           "qsgd",
                           "qsgd:bits=2,coder=elias,norm=l2",
                           "qsgd:levels=100,coder=elias-dense,bucket=4294967288",
                           "qsgd:levels=1000,coder=elias,norm=l2",
                           "qsgd:bits=14"}) {
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
  EXPECT_EQ(Codec::from_wire({.id = 3, .param_a = 1}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 4, .param_a = 1}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 5, .param_a = 1}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 5, .param_b = 4}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 17, .param_b = 5}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 18, .param_a = 3}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 18, .param_a = 4}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 18, .param_b = 5}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 16, .param_a = 3}).status().code(), StatusCode::kReservedBits);
  EXPECT_EQ(Codec::from_wire({.id = 16, .param_b = 7}).status().code(), StatusCode::kReservedBits);
  const auto qsgd = [](int param_a, uint32_t param_b) {
    return Codec::from_wire(
               {.id = 24, .param_a = static_cast<uint16_t>(param_a), .param_b = param_b})
        .status()
        .code();
  };
  EXPECT_EQ(qsgd(7, 512), StatusCode::kOk);
  EXPECT_EQ(qsgd(0, 512), StatusCode::kReservedBits);
  EXPECT_EQ(qsgd(7 | 3 << 7, 512), StatusCode::kReservedBits);
  EXPECT_EQ(qsgd(3 << 7 | 1 << 10, 512), StatusCode::kReservedBits);
  EXPECT_EQ(qsgd(1 << 10, 512), StatusCode::kOk);  // 128 levels
  EXPECT_EQ(qsgd(0xfc7f, 512), StatusCode::kOk);   // 8191 levels
  EXPECT_EQ(qsgd(7, 0), StatusCode::kReservedBits);
  EXPECT_EQ(qsgd(7, 12), StatusCode::kReservedBits);
}

}  // namespace
}  // namespace gradwire
