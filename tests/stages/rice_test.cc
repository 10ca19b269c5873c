#include "stages/rice/rice.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "stages/trits/trit_bits.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

// Trits, as numbers and as bits.
struct Trits {
  std::vector<int> of;
  std::vector<uint64_t> plus, minus;

  explicit Trits(size_t n) : of(n), plus(trit_words(n)), minus(trit_words(n)) {}
  explicit Trits(const std::vector<int>& trits) : Trits(trits.size()) {
    for (size_t i = 0; i < trits.size(); ++i) set(i, trits[i]);
  }
  void set(size_t i, int trit) {
    of[i] = trit;
    if (trit != 0) set_trit(plus.data(), minus.data(), i, trit);
  }
  [[nodiscard]] size_t size() const { return of.size(); }
};

// Each trit is not 0 with probability `density`. With `run`, the density changes after every `run`
// values between this and a twentieth of it.
Trits sparse_trits(size_t n, double density, size_t run, uint32_t seed) {
  std::mt19937 random(seed);
  Trits trits(n);
  for (size_t i = 0; i < n; ++i) {
    const double here = run == 0 || i / run % 2 == 0 ? density : density / 20;
    const bool is_set = static_cast<double>(random()) < here * 4294967296.0;
    if (is_set) trits.set(i, random() % 2 == 0 ? 1 : -1);
  }
  return trits;
}

std::vector<uint8_t> encode(const Kernels& table, const Trits& trits) {
  std::vector<uint8_t> out(packed_size(trits.size()));
  out.resize(table.rice_encode(trits.plus.data(), trits.minus.data(), trits.size(), out.data()));
  return out;
}

// The code by its definition, bit by bit. Empty: it would be no smaller than packed bytes.
std::vector<uint8_t> coded_by_bits(const Trits& trits) {
  std::vector<uint8_t> bytes;
  size_t at = 0;
  const auto put = [&](uint32_t bits, int length) {
    for (int i = 0; i < length; ++i, ++at) {
      if (at % 8 == 0) bytes.push_back(0);
      bytes.back() = static_cast<uint8_t>(bytes.back() | (bits >> i & 1) << at % 8);
    }
  };
  std::vector<std::pair<uint32_t, uint32_t>> group;  // gaps and signs
  const auto put_group = [&] {
    const auto length = [&](int k) {
      int sum = 0;
      for (const auto& [gap, sign] : group) sum += rice_code(gap, sign, k).length;
      return sum;
    };
    int best = 0;
    for (int k = 1; k < 16; ++k) best = length(k) < length(best) ? k : best;
    put(static_cast<uint32_t>(best), 4);
    for (const auto& [gap, sign] : group) {
      const RiceCode code = rice_code(gap, sign, best);
      put(code.bits, code.length);
    }
    group.clear();
  };
  size_t next = 0;
  for (size_t i = 0; i < trits.size(); ++i) {
    if (trits.of[i] == 0) continue;
    group.emplace_back(static_cast<uint32_t>(i - next), trits.of[i] < 0 ? 1 : 0);
    next = i + 1;
    if (group.size() == 32) put_group();
  }
  if (!group.empty()) put_group();
  if (bytes.size() >= packed_size(trits.size())) bytes.clear();
  return bytes;
}

// The way back, of bytes that are no packed bytes. false: they stand for no n trits.
bool read_by_bits(const std::vector<uint8_t>& bytes, size_t n, std::vector<int>& trits) {
  trits.assign(n, 0);
  size_t at = 0;
  const auto has = [&](size_t length) { return 8 * bytes.size() - at >= length; };
  const auto peek = [&] { return static_cast<uint32_t>(bytes[at / 8] >> at % 8 & 1); };
  const auto take = [&](int length) {
    uint32_t bits = 0;
    for (int i = 0; i < length; ++i, ++at) bits |= peek() << i;
    return bits;
  };
  const auto ended = [&] { return !has(8) && (!has(1) || bytes.back() >> at % 8 == 0); };
  size_t next = 0;
  while (!ended()) {
    if (!has(4)) return false;
    const int k = static_cast<int>(take(4));
    for (int i = 0; i < 32 && (i == 0 || !ended()); ++i) {
      size_t zeros = 0;
      for (; zeros < 11 && has(1) && peek() == 0; ++zeros) ++at;
      const bool escaped = zeros == 11;
      const int rest = escaped ? 16 : k;
      if (!has(static_cast<size_t>(rest) + (escaped ? 1 : 2))) return false;
      if (!escaped) ++at;
      const bool negative = take(1) != 0;
      const size_t place = next + (escaped ? 0 : zeros << k) + take(rest);
      if (place >= n) return false;
      trits[place] = negative ? -1 : 1;
      next = place + 1;
    }
  }
  return true;
}

class Rice : public StageTest {
 protected:
  void expect_round_trip(const Trits& trits) {
    const size_t n = trits.size();
    const std::vector<uint8_t> bytes = encode(kernels(), trits);
    std::vector<uint8_t> want = coded_by_bits(trits);
    if (want.empty() && !bytes.empty()) {
      want.resize(packed_size(n));
      pack_trit_bits(trits.plus.data(), trits.minus.data(), n, want.data());
    }
    ASSERT_EQ(bytes, want);
    Trits back(n);
    std::fill(back.plus.begin(), back.plus.end(), ~uint64_t{0});
    ASSERT_TRUE(
        kernels().rice_decode(bytes.data(), bytes.size(), n, back.plus.data(), back.minus.data()));
    ASSERT_EQ(back.plus, trits.plus);
    ASSERT_EQ(back.minus, trits.minus);
    std::vector<float> stored(n, NAN);
    std::vector<float> added(n, -0.0f);
    ASSERT_TRUE(kernels().rice_unpack(bytes.data(), bytes.size(), n, 3.0f, stored.data(), kStore));
    ASSERT_TRUE(kernels().rice_unpack(bytes.data(), bytes.size(), n, 3.0f, added.data(), kAdd));
    for (size_t i = 0; i < n; ++i) {
      const float value = 3.0f * static_cast<float>(trits.of[i]);
      ASSERT_EQ(bits_of(stored[i]), bits_of(value)) << i;
      ASSERT_EQ(bits_of(added[i]), bits_of(trits.of[i] == 0 ? -0.0f : value)) << i;
    }
  }
};
GRADWIRE_FOR_EACH_TABLE(Rice);

// The bytes are written by hand; the comments show the first bit first.
TEST_P(Rice, GoldenBytes) {
  Trits trits(100);
  EXPECT_EQ(encode(kernels(), trits), std::vector<uint8_t>());
  trits.set(0, 1);
  trits.set(3, -1);
  // k = 0 (0000); gap 0, + (1 0); gap 2, - (001 1); padding
  EXPECT_EQ(encode(kernels(), trits), (std::vector<uint8_t>{0x10, 0x03}));
  Trits one(100);
  one.set(99, -1);
  // 99 = 1 * 64 + 35 = 3 * 32 + 3, 9 bits and 10: k = 6 (0110); 01 1 110001; padding
  EXPECT_EQ(encode(kernels(), one), (std::vector<uint8_t>{0xe6, 0x11}));
}

// 31 neighbours make k = 0, so the gap of 300 after them is an escape. The last non-zero is in a
// block of its own.
TEST_P(Rice, GoldenEscape) {
  Trits trits(1000);
  for (size_t i = 0; i < 31; ++i) trits.set(i, 1);
  trits.set(31 + 300, -1);
  trits.set(31 + 301, 1);
  // 1 0 from bit 4 on, 31 times; bits 66 to 76: zeros; 77: the sign; 78: 300 = 0x12c; 94: k = 0;
  // 98: 1 0
  const std::vector<uint8_t> want = {0x50, 0x55, 0x55, 0x55, 0x55, 0x55, 0x55,
                                     0x55, 0x01, 0x20, 0x4b, 0x00, 0x04};
  EXPECT_EQ(encode(kernels(), trits), want);
}

TEST_P(Rice, RoundTripsForAllLengthsAndDensities) {
  for (size_t n : lengths()) {
    if (n > kMaxRunInput * kTritsPerByte) continue;  // no chunk is longer
    SCOPED_TRACE(n);
    for (double density : {0.0, 0.001, 0.01, 0.05, 0.3, 0.6, 1.0}) {
      expect_round_trip(sparse_trits(n, density, 0, static_cast<uint32_t>(n)));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Rice, RoundTripsWhereDensityChanges) {
  for (size_t run : {40u, 300u, 5000u}) {
    for (double density : {0.9, 0.3, 0.02}) {
      SCOPED_TRACE(density);
      expect_round_trip(sparse_trits(40960, density, run, 7));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Rice, DenseTritsGoPacked) {
  for (size_t n : {1u, 5u, 64u, 1003u, 40960u}) {
    const Trits trits(std::vector<int>(n, -1));
    const std::vector<uint8_t> bytes = encode(kernels(), trits);
    ASSERT_EQ(bytes.size(), packed_size(n));
    EXPECT_EQ(bytes[0], n == 1 ? 40 : 0);
    expect_round_trip(trits);
  }
}

double entropy_bits(const Trits& trits) {
  double bits = 0;
  for (int level : {-1, 0, 1}) {
    const auto count = static_cast<double>(std::count(trits.of.begin(), trits.of.end(), level));
    if (count > 0) bits += count * std::log2(static_cast<double>(trits.size()) / count);
  }
  return bits;
}

// Independent trits, the worst case: no part of a chunk is denser than another.
TEST(RiceSize, IsNearTheEntropy) {
  const Kernels& best = *available_kernels()[0];
  for (double density : {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2}) {
    double bits = 0;
    double entropy = 0;
    for (uint32_t seed = 0; seed < 8; ++seed) {
      const Trits trits = sparse_trits(40960, density, 0, seed);
      bits += 8.0 * static_cast<double>(encode(best, trits).size());
      entropy += entropy_bits(trits);
    }
    EXPECT_LT(bits, entropy * 1.04) << density;
  }
}

class RiceInput : public Rice {};
GRADWIRE_FOR_EACH_TABLE(RiceInput);

// All tables give the same result for any bytes, and touch nothing outside the spans.
TEST_P(RiceInput, AnyBytesAreSafe) {
  std::mt19937 mersenne(3);
  const auto random = [&] { return static_cast<uint32_t>(mersenne()); };
  Guarded<uint8_t> input(200);
  Guarded<float> out(2000);
  Guarded<uint64_t> plus(40), minus(40);
  int valid = 0;
  for (int round = 0; round < 4000; ++round) {
    const size_t n = 1 + random() % 1000;
    const Edge edge = kEdges[random() % 2];
    std::vector<uint8_t> bytes = any_bytes(random() % (packed_size(n) + 2), 0, 255, random());
    if (round % 2 == 0) {  // almost valid bytes
      bytes = encode(scalar(), sparse_trits(n, 0.05, 0, random()));
      if (!bytes.empty() && round % 4 == 0) {
        uint8_t& byte = bytes[random() % bytes.size()];
        byte = static_cast<uint8_t>(byte ^ 1u << random() % 8);
      }
      if (round % 8 == 2) bytes.resize(random() % (bytes.size() + 1));
    }
    std::vector<uint64_t> want_plus(trit_words(n)), want_minus(trit_words(n));
    const bool good =
        scalar().rice_decode(bytes.data(), bytes.size(), n, want_plus.data(), want_minus.data());
    valid += good;
    if (bytes.size() < packed_size(n)) {
      std::vector<int> trits;
      ASSERT_EQ(read_by_bits(bytes, n, trits), good);
      if (good) {
        ASSERT_EQ(Trits(trits).plus, want_plus);
        ASSERT_EQ(Trits(trits).minus, want_minus);
      }
    }
    const uint8_t* data = input.take_copy(bytes, edge);
    ASSERT_EQ(kernels().rice_decode(data, bytes.size(), n, plus.take(trit_words(n), edge),
                                    minus.take(trit_words(n), edge)),
              good);
    ASSERT_TRUE(plus.outside_untouched() && minus.outside_untouched());
    if (good) {
      ASSERT_EQ(plus.copy(), want_plus);
      ASSERT_EQ(minus.copy(), want_minus);
    }
    ASSERT_EQ(kernels().rice_unpack(data, bytes.size(), n, 1.0f, out.take(n, edge), kStore), good);
    ASSERT_TRUE(out.outside_untouched());
    ASSERT_EQ(kernels().rice_unpack(data, bytes.size(), n, 1.0f, out.take(n, edge), kAdd), good);
    ASSERT_TRUE(out.outside_untouched());
  }
  EXPECT_GT(valid, 500);
  EXPECT_LT(valid, 3500);
}

TEST_P(RiceInput, RefusesWhatNoEncoderWrites) {
  const auto decodes = [&](const std::vector<uint8_t>& bytes, size_t n) {
    std::vector<float> out(n);
    return kernels().rice_unpack(bytes.data(), bytes.size(), n, 1.0f, out.data(), kStore);
  };
  EXPECT_TRUE(decodes({}, 100));
  EXPECT_TRUE(decodes({0x10, 0x03}, 100));
  EXPECT_TRUE(decodes({0x10, 0x03}, 11));
  EXPECT_FALSE(decodes({0x10, 0x83}, 100));        // padding that begins a code
  EXPECT_FALSE(decodes({0x10, 0x03, 0x00}, 100));  // a byte of padding
  EXPECT_FALSE(decodes({0x00}, 100));              // a k alone
  EXPECT_FALSE(decodes({0x0c}, 100));              // the same
  EXPECT_FALSE(decodes({0x06, 0x00}, 100));        // nothing but zeros after k
  EXPECT_FALSE(decodes({0x0f, 0x00, 0x00}, 100));  // an escape that is cut
  EXPECT_FALSE(decodes({0xe6, 0x11}, 99));         // the non-zero after the end
  EXPECT_TRUE(decodes({0xe6, 0x11}, 100));
  EXPECT_FALSE(decodes(std::vector<uint8_t>(21, 121), 100));  // more than packed bytes
  EXPECT_TRUE(decodes(std::vector<uint8_t>(20, 121), 100));   // packed
  EXPECT_FALSE(decodes(std::vector<uint8_t>(20, 243), 100));
  EXPECT_FALSE(decodes({122}, 4));  // packed, padding that is not 0
}

class TritBits : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(TritBits);

// The kernel gives the trits and residuals of ternary_pack.
TEST_P(TritBits, AreThoseOfTernaryPack) {
  Guarded<float> x(41000), r(41000);
  Guarded<uint16_t> r16(41000);
  Guarded<uint64_t> plus(700), minus(700);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const auto values = gradient_like(n, static_cast<uint32_t>(n));
    auto left = gradient_like(n, static_cast<uint32_t>(n) + 1);
    std::vector<uint16_t> left16(n);
    scalar().narrow_bf16(left.data(), n, left16.data());
    std::vector<uint8_t> want(packed_size(n)), packed(packed_size(n));
    const float m = 2e-3f;
    const float* px = x.take_copy(values, edge);
    float* pr = r.take_copy(left, edge);
    uint16_t* pr16 = r16.take_copy(left16, edge);
    const auto check = [&] {
      pack_trit_bits(plus.copy().data(), minus.copy().data(), n, packed.data());
      ASSERT_EQ(packed, want) << n;
      ASSERT_TRUE(plus.outside_untouched() && minus.outside_untouched()) << n;
      std::vector<uint64_t> all_plus(trit_words(n)), all_minus(trit_words(n));
      ASSERT_TRUE(unpack_trit_bits(packed.data(), n, all_plus.data(), all_minus.data()));
      ASSERT_EQ(plus.copy(), all_plus) << n;
      ASSERT_EQ(minus.copy(), all_minus) << n;
    };
    kernels().trit_bits(px, {}, n, m, plus.take(trit_words(n), edge),
                        minus.take(trit_words(n), edge));
    scalar().ternary_pack(px, {}, n, m, want.data());
    check();
    kernels().trit_bits(px, pr, n, m, plus.take(trit_words(n), edge),
                        minus.take(trit_words(n), edge));
    scalar().ternary_pack(px, left.data(), n, m, want.data());
    check();
    ASSERT_SAME_BITS(r.copy(), left);
    kernels().trit_bits(px, pr16, n, m, plus.take(trit_words(n), edge),
                        minus.take(trit_words(n), edge));
    scalar().ternary_pack(px, left16.data(), n, m, want.data());
    check();
    ASSERT_EQ(r16.copy(), left16);
    ASSERT_TRUE(r.outside_untouched() && r16.outside_untouched());
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace gradwire
