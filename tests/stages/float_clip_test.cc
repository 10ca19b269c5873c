#include "stages/float_clip/float_clip.h"

#include <algorithm>

#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

class FloatClipStage : public StageTest {
 protected:
  std::vector<uint8_t> encode(const Kernels& table, const std::vector<float>& x,
                              const FloatClip& clip) const {
    std::vector<uint8_t> bursts((x.size() + 7) / 8 * kMaxBurstSize);
    bursts.resize(table.float_clip_encode(x.data(), x.size(), clip, bursts.data()));
    return bursts;
  }
};
GRADWIRE_FOR_EACH_TABLE(FloatClipStage);

// Magnitudes of every class, some of them exactly where a class begins.
std::vector<float> mixed_sizes(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> x(n);
  for (float& value : x) {
    const auto exponent = static_cast<uint32_t>(112 + random() % 18);
    const uint32_t mantissa = random() % 4 == 0 ? 0 : static_cast<uint32_t>(random()) >> 9;
    value = float_of((static_cast<uint32_t>(random()) & 0x80000000u) | exponent << 23 | mantissa);
  }
  return x;
}

std::vector<FloatClip> clips() {
  std::vector<FloatClip> all;
  for (ClipMode mode : {ClipMode::kPaper, ClipMode::kStrict}) {
    for (int bound : {10, 8, 6}) all.push_back(float_clip(bound, mode));
  }
  return all;
}

TEST_P(FloatClipStage, GoldenCodes) {
  const FloatClip paper = float_clip(10, ClipMode::kPaper);
  const struct {
    float x;
    uint32_t tag;
    std::vector<uint8_t> code;
    float value;
  } kGolden[] = {
      {0.5f, 2, {0x00, 0x40}, 0.5f},
      {-0.75f, 2, {0x00, 0xe0}, -0.75f},
      {0.1f, 2, {0xcc, 0x0c}, 3276.0f / 32768},
      {0.03f, 1, {0x03}, 3.0f / 128},
      {-0.0099f, 1, {0x81}, -1.0f / 128},
      {0.0009f, 0, {}, 0.0f},
      {1.0f, 3, {0x00, 0x00, 0x80, 0x3f}, 1.0f},
      {-1e30f, 3, {0xca, 0xf2, 0x49, 0xf1}, -1e30f},
      {0x1p-10f, 1, {0x00}, 0.0f},
      {-0x1p-8f, 1, {0x80}, -0.0f},
      {0x1p-5f, 2, {0x00, 0x04}, 0x1p-5f},
      {0x1.fffffep-6f, 1, {0x03}, 3.0f / 128},
      {0x1.fffffep-11f, 0, {}, 0.0f},
      {0x1.fffffep-1f, 2, {0xff, 0x7f}, 32767.0f / 32768},
      {0x1p-149f, 0, {}, 0.0f},
      {-0.0f, 0, {}, 0.0f},
      {std::numeric_limits<float>::infinity(),
       3,
       {0x00, 0x00, 0x80, 0x7f},
       std::numeric_limits<float>::infinity()},
      {float_of(0xff800001u), 3, {0x01, 0x00, 0x80, 0xff}, float_of(0xff800001u)},
  };
  for (const auto& [x, tag, code, value] : kGolden) {
    // Three bursts, so that every code path for bursts sees the value.
    std::vector<uint8_t> want;
    for (size_t count : {8u, 8u, 3u}) {
      const uint32_t tags = tag * 0x5555u & ((1u << 2 * count) - 1);
      want.push_back(static_cast<uint8_t>(tags));
      want.push_back(static_cast<uint8_t>(tags >> 8));
      for (size_t i = 0; i < count; ++i) want.insert(want.end(), code.begin(), code.end());
    }
    EXPECT_EQ(encode(kernels(), std::vector<float>(19, x), paper), want) << x;
    std::vector<float> out(19, 7.0f);
    want.resize(want.size() + 40);  // so that whole vectors may be read
    EXPECT_FALSE(kernels().float_clip_decode(want.data(), want.size(), 19, out.data(), kStore));
    want.resize(want.size() - 40);
    ASSERT_TRUE(kernels().float_clip_decode(want.data(), want.size(), 19, out.data(), kStore));
    EXPECT_SAME_BITS(out, std::vector<float>(19, value)) << x;
  }
}

TEST_P(FloatClipStage, StrictTakesSixteenBitsWhereEightCutOffTooMuch) {
  const FloatClip strict = float_clip(10, ClipMode::kStrict);
  const auto tag_of = [&](float x) {
    return encode(kernels(), std::vector<float>(16, x), strict)[0] & 3u;
  };
  EXPECT_EQ(tag_of(0x1p-10f), kClip16);
  EXPECT_EQ(tag_of(0x1p-7f), kClip8);
  EXPECT_EQ(tag_of(0x1p-7f + 0x1p-10f), kClip16);
  EXPECT_EQ(tag_of(std::nextafter(0x1p-7f + 0x1p-10f, 0.0f)), kClip8);
  EXPECT_EQ(tag_of(0x1.fffffep-6f), kClip16);
  EXPECT_EQ(tag_of(0x1p-6f), kClip8);
  EXPECT_EQ(tag_of(0x1.fffffep-11f), kClipNone);
}

TEST_P(FloatClipStage, GivesTheBytesOfTheDefinition) {
  for (const FloatClip& clip : clips()) {
    for (uint32_t seed = 0; seed < 4; ++seed) {
      for (const auto& x : {mixed_sizes(41003, seed), any_numbers(41003, seed),
                            gradient_like(41003, seed), special_numbers()}) {
        ASSERT_EQ(encode(kernels(), x, clip), encode(scalar(), x, clip));
      }
    }
  }
}

// All 65536 values of the tags, with random bytes as codes: a 32-bit code may be a value below 1.
TEST_P(FloatClipStage, DecodesAnyBursts) {
  std::mt19937 random(1);
  std::vector<uint8_t> bursts;
  for (uint32_t tags = 0; tags < 65536; ++tags) {
    bursts.push_back(static_cast<uint8_t>(tags));
    bursts.push_back(static_cast<uint8_t>(tags >> 8));
    for (uint32_t i = 0; i < clip_codes_size(tags); ++i) {
      bursts.push_back(static_cast<uint8_t>(random() >> 8));
    }
  }
  const size_t n = 65536 * kBurstValues;
  std::vector<float> out(n), want(n);
  ASSERT_TRUE(scalar().float_clip_decode(bursts.data(), bursts.size(), n, want.data(), kStore));
  ASSERT_TRUE(kernels().float_clip_decode(bursts.data(), bursts.size(), n, out.data(), kStore));
  ASSERT_TRUE(bits_of_all(out) == bits_of_all(want));
  const std::vector<float> sums = gradient_like(n, 5);
  std::vector<float> added = sums;
  ASSERT_TRUE(kernels().float_clip_decode(bursts.data(), bursts.size(), n, added.data(), kAdd));
  for (size_t i = 0; i < n; ++i) {
    if (std::isnan(want[i])) {
      ASSERT_TRUE(std::isnan(added[i]));
    } else {
      ASSERT_EQ(bits_of(added[i]), bits_of(sums[i] + want[i])) << i;
    }
  }
}

TEST_P(FloatClipStage, StaysInItsSpans) {
  Guarded<float> x(41000);
  Guarded<uint8_t> bursts(41000 / 8 * kMaxBurstSize);
  const FloatClip clip = float_clip(10, ClipMode::kPaper);
  for (size_t n : lengths()) {
    for (Edge edge : kEdges) {
      const auto values = n % 3 == 0   ? std::vector<float>(n, 0.0f)
                          : n % 3 == 1 ? any_numbers(n, static_cast<uint32_t>(n))
                                       : mixed_sizes(n, static_cast<uint32_t>(n));
      const auto want = encode(scalar(), values, clip);
      const size_t room = (n + 7) / 8 * kBurstTagBytes + n * sizeof(float);
      const size_t size =
          kernels().float_clip_encode(x.take_copy(values, edge), n, clip, bursts.take(room, edge));
      ASSERT_EQ(size, want.size()) << n;
      const auto written = bursts.copy();
      ASSERT_TRUE(std::equal(want.begin(), want.end(), written.begin())) << n;
      ASSERT_TRUE(bursts.outside_untouched()) << n;
      std::vector<float> decoded(n);
      ASSERT_TRUE(scalar().float_clip_decode(want.data(), size, n, decoded.data(), kStore));
      const uint8_t* from = bursts.take_copy(want, edge);
      ASSERT_TRUE(kernels().float_clip_decode(from, size, n, x.take(n, edge), kStore)) << n;
      ASSERT_SAME_BITS(x.copy(), decoded) << n;
      ASSERT_TRUE(x.outside_untouched()) << n;
      const auto sums = gradient_like(n, 3);
      ASSERT_TRUE(kernels().float_clip_decode(from, size, n, x.take_copy(sums, edge), kAdd)) << n;
      for (size_t i = 0; i < n; ++i) decoded[i] += sums[i];
      ASSERT_SAME_BITS(x.copy(), decoded) << n;
      ASSERT_TRUE(x.outside_untouched()) << n;
    }
  }
}

TEST_P(FloatClipStage, RefusesWhatIsNotItsBursts) {
  Guarded<uint8_t> guarded(1000);
  std::vector<float> out(100);
  const auto decode = [&](const std::vector<uint8_t>& bytes, size_t n) {
    return kernels().float_clip_decode(guarded.take_copy(bytes, Edge::kEnd), bytes.size(), n,
                                       out.data(), kStore);
  };
  for (size_t n : {1u, 7u, 8u, 9u, 16u, 100u}) {
    const auto bytes = encode(scalar(), mixed_sizes(n, 4), float_clip(8, ClipMode::kPaper));
    EXPECT_TRUE(decode(bytes, n));
    for (size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_FALSE(decode({bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size)}, n));
    }
    auto longer = bytes;
    longer.push_back(0);
    EXPECT_FALSE(decode(longer, n));
    longer.resize(bytes.size() + 50);
    EXPECT_FALSE(decode(longer, n));
  }
  EXPECT_TRUE(decode({}, 0));
  EXPECT_FALSE(decode({0, 0}, 0));
  EXPECT_TRUE(decode({0x10, 0x00, 0x40}, 3));
  EXPECT_FALSE(decode({0x40, 0x00, 0x40}, 3));  // the fourth of three values
  EXPECT_FALSE(decode({0x10, 0x40, 0x40, 0x40}, 3));
}

}  // namespace
}  // namespace gradwire
