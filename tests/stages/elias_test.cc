#include "stages/elias/elias.h"

#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

std::string text_of(BitCode code) {
  std::string text;
  for (int i = code.length - 1; i >= 0; --i) text += (code.bits >> i & 1) != 0 ? '1' : '0';
  return text;
}

// The definition: c = "0"; while k > 1: c = bin(k) + c; k = len(bin(k)) - 1.
std::string definition(uint32_t k) {
  std::string code = "0";
  while (k > 1) {
    std::string digits;
    for (uint32_t rest = k; rest > 0; rest /= 2) digits.insert(0, rest % 2 != 0 ? "1" : "0");
    code = digits + code;
    k = static_cast<uint32_t>(digits.size()) - 1;
  }
  return code;
}

TEST(Elias, KnownCodes) {
  const std::pair<uint32_t, const char*> kKnown[] = {{1, "0"},
                                                     {2, "100"},
                                                     {3, "110"},
                                                     {4, "101000"},
                                                     {5, "101010"},
                                                     {7, "101110"},
                                                     {8, "1110000"},
                                                     {15, "1111110"},
                                                     {16, "10100100000"},
                                                     {17, "10100100010"},
                                                     {31, "10100111110"},
                                                     {32, "101011000000"},
                                                     {100, "1011011001000"},
                                                     {1000, "11100111111010000"},
                                                     {1000000, "1010010011111101000010010000000"}};
  for (const auto& [k, code] : kKnown) EXPECT_EQ(text_of(elias_code(k)), code) << k;
}

TEST(Elias, FollowsItsDefinitionAndReadsBack) {
  for (uint32_t k = 1; k <= 1000000; k += k < 70000 ? 1 : 997) {
    const BitCode code = elias_code(k);
    ASSERT_EQ(text_of(code), definition(k)) << k;
    // The bits after the code are ones, which the reader must ignore.
    const uint64_t window = code.bits << (64 - code.length) | ~uint64_t{0} >> code.length;
    const EliasNumber number = elias_read(window);
    if (k < kEliasLimit) {
      ASSERT_EQ(number.value, k);
      ASSERT_EQ(number.length, code.length);
    } else {
      ASSERT_EQ(number.length, 0) << k;
    }
  }
  EXPECT_EQ(elias_read(~uint64_t{0}).length, 0);
}

TEST(Elias, OfLevels) {
  EXPECT_EQ(text_of(sparse_level_code(1)), "00");
  EXPECT_EQ(text_of(sparse_level_code(-3)), "1110");
  EXPECT_EQ(text_of(dense_level_code(0)), "0");
  EXPECT_EQ(text_of(dense_level_code(1)), "1000");
  EXPECT_EQ(text_of(dense_level_code(-2)), "1101");
}

// The codes of levels by their definition, bit by bit.
std::vector<uint8_t> coded_by_bits(const std::vector<int8_t>& levels, bool sparse) {
  std::string text;
  uint32_t distance = 1;
  for (int8_t level : levels) {
    const char* sign = level < 0 ? "1" : "0";
    const auto magnitude = static_cast<uint32_t>(std::abs(level));
    if (!sparse) text += definition(magnitude + 1) + (level == 0 ? "" : sign);
    if (sparse && level != 0) text += definition(distance) + sign + definition(magnitude);
    distance = level != 0 ? 1 : distance + 1;
  }
  if (sparse) text += definition(distance);
  std::vector<uint8_t> bytes((text.size() + 7) / 8);
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '1') bytes[i / 8] = static_cast<uint8_t>(bytes[i / 8] | 0x80 >> i % 8);
  }
  return bytes;
}

// The way back. false: the bytes stand for no n levels up to s.
bool read_by_bits(const std::vector<uint8_t>& bytes, bool sparse, int32_t s,
                  std::vector<int8_t>& levels) {
  size_t at = 0;
  const auto bit = [&] {
    const bool is_set = at / 8 < bytes.size() && (bytes[at / 8] << at % 8 & 0x80) != 0;
    ++at;
    return is_set;
  };
  const auto number = [&]() -> uint64_t {
    uint64_t value = 1;
    while (bit()) {
      if (value >= 16) return 0;
      uint64_t next = 1;
      for (; value > 0; --value) next = next << 1 | (bit() ? 1 : 0);
      value = next;
    }
    return value;
  };
  const auto level_of = [&](uint64_t magnitude, bool negative) {
    const auto level = static_cast<int>(magnitude);
    return static_cast<int8_t>(negative ? -level : level);
  };
  const auto at_end = [&] {
    if ((at + 7) / 8 != bytes.size()) return false;
    while (at % 8 != 0) {
      if (bit()) return false;
    }
    return true;
  };
  const auto largest = static_cast<uint64_t>(s);
  std::ranges::fill(levels, int8_t{0});
  for (size_t i = 0; !sparse && i < levels.size(); ++i) {
    const uint64_t value = number();
    if (value == 0 || value > largest + 1) return false;
    levels[i] = level_of(value - 1, value > 1 && bit());
  }
  if (!sparse) return at_end();
  for (size_t i = 0;;) {
    const uint64_t distance = number();
    if (distance == 0 || distance > levels.size() + 1 - i) return false;
    i += distance;
    if (i > levels.size()) return at_end();
    const bool negative = bit();
    const uint64_t magnitude = number();
    if (magnitude == 0 || magnitude > largest) return false;
    levels[i - 1] = level_of(magnitude, negative);
  }
}

class EliasLevels : public StageTest {
 protected:
  // Encoders and decoders in one shape.
  struct Coder {
    size_t (*encode)(const int8_t*, size_t, uint8_t*);
    bool (*decode)(const uint8_t*, size_t, size_t, int32_t, int8_t*);
    uint64_t (*room)(uint64_t, int32_t);
    uint64_t (*least)(uint64_t);
  };
  static std::vector<Coder> coders(const Kernels& table) {
    return {{table.encode_sparse_levels, table.decode_sparse_levels, sparse_levels_room,
             sparse_levels_least},
            {table.encode_dense_levels, table.decode_dense_levels, dense_levels_room,
             dense_levels_least}};
  }
  static std::vector<uint8_t> coded(const Coder& coder, const std::vector<int8_t>& levels,
                                    int32_t s) {
    std::vector<uint8_t> out(coder.room(levels.size(), s));
    out.resize(coder.encode(levels.data(), levels.size(), out.data()));
    return out;
  }
};
GRADWIRE_FOR_EACH_TABLE(EliasLevels);

// Levels of which about one in `one_in` is not 0; small levels are more frequent.
std::vector<int8_t> some_levels(size_t n, int32_t s, unsigned one_in, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int8_t> levels(n);
  for (int8_t& level : levels) {
    if (random() % one_in != 0) continue;
    const auto bound = static_cast<uint32_t>(1 + random() % static_cast<uint32_t>(s));
    const auto magnitude = static_cast<int32_t>(1 + random() % bound);
    level = static_cast<int8_t>(random() % 2 != 0 ? -magnitude : magnitude);
  }
  return levels;
}

TEST_P(EliasLevels, GoldenBytes) {
  const std::vector<int8_t> levels = {0, 1, -3, 0, 0};
  // 100 0 0, 0 1 110, 110: a level 1 at distance 2, -3 at 1, and the end at 3.
  EXPECT_EQ(coded(coders(kernels())[0], levels, 3), (std::vector<uint8_t>{0x83, 0xb0}));
  // 0, 100 0, 101000 1, 0, 0
  EXPECT_EQ(coded(coders(kernels())[1], levels, 3), (std::vector<uint8_t>{0x45, 0x10}));
  EXPECT_EQ(coded(coders(kernels())[0], {}, 1), (std::vector<uint8_t>{0x00}));
  EXPECT_EQ(coded(coders(kernels())[1], {}, 1), (std::vector<uint8_t>{}));
}

TEST_P(EliasLevels, AgreeWithTheDefinitionAndReadBack) {
  Guarded<int8_t> levels(41000);
  Guarded<uint8_t> bytes(90000);
  const int32_t kLargest[] = {1, 3, 7, 22, 127};
  const unsigned kOneIn[] = {1, 2, 4, 30, 1000, 100000};
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const int32_t s = kLargest[n % 5];
    const auto given = some_levels(n, s, kOneIn[n % 6], static_cast<uint32_t>(n));
    for (size_t c = 0; c < 2; ++c) {
      const Coder coder = coders(kernels())[c];
      const auto want = coded_by_bits(given, c == 0);
      ASSERT_GE(want.size(), coder.least(n)) << n;
      uint8_t* out = bytes.take(coder.room(n, s), edge);
      const size_t size = coder.encode(levels.take_copy(given, edge), n, out);
      ASSERT_EQ(std::vector<uint8_t>(out, out + size), want) << n << " " << c;
      ASSERT_TRUE(bytes.outside_untouched()) << n;
      const uint8_t* in = bytes.take_copy(want, edge);
      ASSERT_TRUE(coder.decode(in, size, n, s, levels.take(n, edge))) << n << " " << c;
      ASSERT_EQ(levels.copy(), given) << n << " " << c;
      ASSERT_TRUE(levels.outside_untouched()) << n;
    }
  }
}

TEST_P(EliasLevels, NeverTakeMoreThanTheirRoom) {
  for (int32_t s = 1; s <= 127; ++s) {
    for (size_t n : {1u, 2u, 3u, 64u, 513u}) {
      for (unsigned one_in : {1u, 2u, 3u}) {
        auto levels = some_levels(n, s, 1, 1);
        for (size_t i = 0; i < n; ++i) levels[i] = static_cast<int8_t>(i % one_in == 0 ? -s : 0);
        for (const Coder& coder : coders(kernels())) {
          std::vector<uint8_t> out(coder.room(n, s) + 64);
          const size_t size = coder.encode(levels.data(), n, out.data());
          ASSERT_LE(size, coder.room(n, s)) << s << " " << n;
          if (one_in == 1) {
            ASSERT_EQ(size, coder.room(n, s)) << s << " " << n;
          }
        }
      }
    }
  }
}

TEST_P(EliasLevels, RefuseOtherNumbersOfBytesAndLevels) {
  for (size_t n : {1u, 7u, 40u, 300u, 5000u}) {
    const auto given = some_levels(n, 7, 3, static_cast<uint32_t>(n));
    for (size_t c = 0; c < 2; ++c) {
      const Coder coder = coders(kernels())[c];
      const auto good = coded(coder, given, 7);
      std::vector<int8_t> levels(n + 2);
      const auto accepts = [&](const std::vector<uint8_t>& bytes, size_t count, int32_t s) {
        return coder.decode(bytes.data(), bytes.size(), count, s, levels.data());
      };
      ASSERT_TRUE(accepts(good, n, 7));
      EXPECT_FALSE(accepts(std::vector<uint8_t>(good.begin(), good.end() - 1), n, 7));
      auto longer = good;
      longer.push_back(0);
      EXPECT_FALSE(accepts(longer, n, 7));
      EXPECT_FALSE(accepts({}, n, 7));
      EXPECT_FALSE(accepts(std::vector<uint8_t>(good.size(), 0xff), n, 7));
      auto large = given;
      large[n / 2] = -7;
      EXPECT_FALSE(accepts(coded(coder, large, 7), n, 6));
    }
  }
}

// Bits after the last code must be 0.
TEST_P(EliasLevels, RefusePadding) {
  std::vector<int8_t> out(3);
  for (size_t n : {1u, 2u, 3u}) {
    const std::vector<int8_t> zeros(n);
    for (size_t c = 0; c < 2; ++c) {
      const Coder coder = coders(kernels())[c];
      auto bytes = coded(coder, zeros, 1);
      ASSERT_TRUE(coder.decode(bytes.data(), 1, n, 1, out.data()));
      bytes[0] |= 1;
      EXPECT_FALSE(coder.decode(bytes.data(), 1, n, 1, out.data())) << n << " " << c;
    }
  }
}

// Every table reads any bytes safely, with the same result.
TEST_P(EliasLevels, AnyBytesAreSafe) {
  Guarded<uint8_t> guarded(1000);
  Guarded<int8_t> levels(1000);
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    const size_t n = seed % 97;
    const auto bytes = any_bytes(seed % 23, 0, seed % 2 == 0 ? 255 : 7, seed);
    const auto s = static_cast<int32_t>(1 + seed % 127);
    for (size_t c = 0; c < 2; ++c) {
      std::vector<int8_t> want(n);
      const bool valid = read_by_bits(bytes, c == 0, s, want);
      const bool got = coders(kernels())[c].decode(guarded.take_copy(bytes, Edge::kEnd),
                                                   bytes.size(), n, s, levels.take(n, Edge::kEnd));
      ASSERT_EQ(got, valid) << seed << " " << c;
      if (valid) {
        ASSERT_EQ(levels.copy(), want) << seed << " " << c;
      }
      ASSERT_TRUE(levels.outside_untouched());
    }
  }
}

}  // namespace
}  // namespace gradwire
