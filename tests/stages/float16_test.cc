#include "stages/half/float16.h"

#include "stages/element/float_bits.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

class Float16 : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(Float16);

TEST_P(Float16, GoldenNarrowing) {
  const struct {
    uint32_t wide;
    uint16_t narrow;
  } kGolden[] = {
      {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x3f800000, 0x3c00},  // 0, -0, 1
      {0x477fe000, 0x7bff}, {0x477fefff, 0x7bff}, {0x477ff000, 0x7c00},  // 65504, to below 65520
      {0x47800000, 0x7c00}, {0x7f7fffff, 0x7c00}, {0xff800000, 0xfc00},  // 65536, FLT_MAX, -Inf
      {0x38800000, 0x0400}, {0x387fe000, 0x0400}, {0x387fdfff, 0x03ff},  // smallest normal, around
      {0x33800000, 0x0001}, {0x33000000, 0x0000}, {0x33000001, 0x0001},  // 2^-24, half of it
      {0x33c00000, 0x0002}, {0x00000001, 0x0000}, {0x80000001, 0x8000},  // 1.5 * 2^-24 to even
      {0x3f801000, 0x3c00}, {0x3f803000, 0x3c02}, {0x3f801001, 0x3c01},  // ties go to even
      {0x7f800001, 0x7e00}, {0xffffffff, 0xfe00},                        // NaN
  };
  for (const auto& [wide, narrow] : kGolden) {
    const std::vector<float> x(67, float_of(wide));
    std::vector<uint16_t> out(67);
    kernels().narrow_f16(x.data(), 67, out.data());
    EXPECT_EQ(out, std::vector<uint16_t>(67, narrow)) << std::hex << wide;
  }
}

TEST_P(Float16, WideningIsExactAndNarrowingUndoesIt) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(all.size());
  kernels().widen_f16(all.data(), all.size(), wide.data(), kStore);
  std::vector<uint16_t> narrow(all.size());
  kernels().narrow_f16(wide.data(), wide.size(), narrow.data());
  for (size_t i = 0; i < all.size(); ++i) {
    const int exponent = static_cast<int>(i >> 10 & 31);
    const auto mantissa = static_cast<float>(i & 0x3ff);
    if (exponent < 31) {
      const float magnitude =
          exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.0f + mantissa, exponent - 25);
      ASSERT_EQ(bits_of(wide[i]), bits_of(i < 0x8000 ? magnitude : -magnitude)) << std::hex << i;
    }
    const bool is_nan = (i & 0x7fff) > 0x7c00;
    ASSERT_EQ(std::isnan(wide[i]), is_nan);
    ASSERT_EQ(narrow[i], is_nan ? ((i & 0x8000) | 0x7e00) : i) << std::hex << i;
  }
}

// This holds for NaN, too: raw promises its bits.
TEST_P(Float16, WideningGivesTheBitsOfTheDefinition) {
  for (uint32_t half = 0; half < 65536; ++half) {
    const std::vector<uint16_t> x(16, static_cast<uint16_t>(half));
    std::vector<float> wide(16);
    kernels().widen_f16(x.data(), 16, wide.data(), kStore);
    ASSERT_SAME_BITS(wide, std::vector<float>(16, widen_f16(x[0]))) << std::hex << half;
  }
}

TEST_P(Float16, NarrowingGivesTheBitsOfTheDefinition) {
  std::mt19937 random(1);
  std::vector<float> x(1 << 18);
  for (size_t i = 0; i < x.size(); ++i) {
    // Any bits, among them NaNs with any fraction bits.
    x[i] = float_of(static_cast<uint32_t>(random()) | (i % 4 == 0 ? kNonFiniteBits : 0));
  }
  std::vector<uint16_t> out(x.size());
  kernels().narrow_f16(x.data(), x.size(), out.data());
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(out[i], narrow_f16(x[i])) << std::hex << bits_of(x[i]);
  }
}

// A value between two neighbours goes to the nearer one, the middle to the even one.
TEST_P(Float16, NarrowingRoundsHalfToEven) {
  std::vector<float> x;
  std::vector<uint16_t> want;
  for (uint16_t half = 0; half < 0x7bff; half = static_cast<uint16_t>(half + 7)) {
    const auto next = static_cast<uint16_t>(half + 1);
    const float middle = (widen_f16(half) + widen_f16(next)) / 2;
    for (float sign : {1.0f, -1.0f}) {
      const auto bit = static_cast<uint16_t>(sign < 0 ? 0x8000 : 0);
      x.insert(x.end(), {sign * std::nextafter(middle, 0.0f), sign * middle,
                         sign * std::nextafter(middle, 1e9f)});
      for (uint16_t to : {half, half % 2 == 0 ? half : next, next}) {
        want.push_back(static_cast<uint16_t>(to | bit));
      }
    }
  }
  std::vector<uint16_t> out(x.size());
  kernels().narrow_f16(x.data(), x.size(), out.data());
  EXPECT_EQ(out, want);
}

TEST_P(Float16, StaysInItsSpansAtAnyAddress) {
  Guarded<float> x(41000);
  Guarded<uint16_t> narrow(41000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const auto values = any_numbers(n, static_cast<uint32_t>(n));
    std::vector<uint16_t> halves(n);
    find_kernels("scalar")->narrow_f16(values.data(), n, halves.data());
    kernels().narrow_f16(x.take_copy(values, edge), n, narrow.take(n, edge));
    ASSERT_EQ(narrow.copy(), halves) << n;
    ASSERT_TRUE(narrow.outside_untouched()) << n;
    std::vector<float> want(n);
    find_kernels("scalar")->widen_f16(halves.data(), n, want.data(), kStore);
    kernels().widen_f16(narrow.take_copy(halves, edge), n, x.take(n, edge), kStore);
    ASSERT_SAME_BITS(x.copy(), want) << n;
    ASSERT_TRUE(x.outside_untouched()) << n;
    const auto sums = gradient_like(n, 3);
    for (size_t i = 0; i < n; ++i) want[i] = sums[i] + want[i];
    std::vector<uint8_t> bytes(2 * n + 1);
    if (n != 0) std::memcpy(bytes.data() + 1, halves.data(), 2 * n);
    kernels().widen_f16(reinterpret_cast<const uint16_t*>(bytes.data() + 1), n,
                        x.take_copy(sums, edge), kAdd);
    for (size_t i = 0; i < n; ++i) {
      if (std::isnan(want[i])) continue;
      ASSERT_EQ(bits_of(x.copy()[i]), bits_of(want[i])) << n;
      if (n > 4096) i += n / 256;
    }
  }
}

}  // namespace
}  // namespace gradwire
