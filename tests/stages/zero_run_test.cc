#include <numeric>

#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

using Bytes = std::vector<uint8_t>;

// The definition (3LC, section 3.3), implemented from the length of each whole run.
Bytes naive_encode(const Bytes& packed) {
  Bytes codes;
  size_t i = 0;
  while (i < packed.size()) {
    size_t run = 0;
    while (i + run < packed.size() && packed[i + run] == 121) ++run;
    codes.insert(codes.end(), run / 14, 255);
    if (run % 14 == 1) codes.push_back(121);
    if (run % 14 >= 2) codes.push_back(static_cast<uint8_t>(243 + (run % 14 - 2)));
    i += run;
    if (i < packed.size()) codes.push_back(packed[i++]);
  }
  return codes;
}

class ZeroRun : public StageTest {
 protected:
  Bytes encode(const Bytes& packed) {
    uint8_t* out = out_.take(packed.size(), Edge::kEnd);
    const size_t size =
        kernels().zero_run_encode(in_.take_copy(packed, Edge::kEnd), packed.size(), out);
    EXPECT_TRUE(out_.outside_untouched());
    EXPECT_LE(size, packed.size());
    return Bytes(out, out + size);
  }

  // Whether `codes` decode to exactly n bytes; these are left in decoded_.
  bool decode(const Bytes& codes, size_t n) {
    const bool ok = kernels().zero_run_decode(in_.take_copy(codes, Edge::kEnd), codes.size(),
                                              out_.take(n, Edge::kEnd), n);
    EXPECT_TRUE(out_.outside_untouched());
    decoded_ = out_.copy();
    return ok;
  }

  void expect_round_trip(const Bytes& packed) {
    const Bytes codes = encode(packed);
    ASSERT_EQ(codes, naive_encode(packed));
    ASSERT_TRUE(decode(codes, packed.size()));
    ASSERT_EQ(decoded_, packed);
  }

  Guarded<uint8_t> in_{kMaxRunInput};
  Guarded<uint8_t> out_{kMaxRunInput};
  Bytes decoded_;
};
GRADWIRE_FOR_EACH_TABLE(ZeroRun);

TEST_P(ZeroRun, GoldenCodes) {
  EXPECT_EQ(encode({}), Bytes{});
  EXPECT_EQ(encode({7}), Bytes{7});
  EXPECT_EQ(encode({121}), Bytes{121});
  EXPECT_EQ(encode({121, 121}), Bytes{243});
  EXPECT_EQ(encode(Bytes(14, 121)), Bytes{255});
  EXPECT_EQ(encode(Bytes(15, 121)), (Bytes{255, 121}));
  EXPECT_EQ(encode(Bytes(16, 121)), (Bytes{255, 243}));
  EXPECT_EQ(encode(Bytes(42, 121)), (Bytes{255, 255, 255}));
  EXPECT_EQ(encode({121, 121, 121, 0, 121, 242, 121, 121}), (Bytes{244, 0, 121, 242, 243}));
}

TEST_P(ZeroRun, EveryRunLengthAtEveryPlace) {
  for (size_t run = 0; run <= 150; ++run) {
    for (size_t before = 0; before <= 66; ++before) {
      for (size_t after : {0u, 1u, 63u}) {
        Bytes packed(before, 5);
        packed.insert(packed.end(), run, 121);
        packed.insert(packed.end(), after, 200);
        ASSERT_NO_FATAL_FAILURE(expect_round_trip(packed)) << run << " " << before << " " << after;
      }
    }
  }
}

TEST_P(ZeroRun, EveryByteValueButCodesStays) {
  Bytes packed(243);
  std::iota(packed.begin(), packed.end(), uint8_t{0});
  EXPECT_EQ(encode(packed), packed);
}

TEST_P(ZeroRun, AllLengthsAndDensities) {
  for (size_t n = 0; n <= 700; ++n) {
    for (unsigned one_in : {1u, 2u, 5u, 20u, 100u}) {
      ASSERT_NO_FATAL_FAILURE(expect_round_trip(sparse_bytes(n, one_in, static_cast<uint32_t>(n))))
          << n << " " << one_in;
    }
  }
  for (size_t n : {size_t{8191}, kMaxRunInput}) {
    for (unsigned one_in : {1u, 2u, 5u, 20u, 100u, 10000u}) {
      ASSERT_NO_FATAL_FAILURE(expect_round_trip(sparse_bytes(n, one_in, 1))) << n;
    }
    ASSERT_NO_FATAL_FAILURE(expect_round_trip(Bytes(n, 121)));
  }
}

// All patterns of zero and other bytes in the first 16 places of a vector.
TEST_P(ZeroRun, EveryPattern) {
  for (unsigned pattern = 0; pattern < 1u << 16; pattern += 1) {
    Bytes packed(17, 9);
    for (unsigned bit = 0; bit < 16; ++bit) {
      if ((pattern >> bit & 1) != 0) packed[bit] = 121;
    }
    ASSERT_EQ(encode(packed), naive_encode(packed)) << pattern;
  }
}

TEST_P(ZeroRun, DecodesCodesThatAreNotTheShortest) {
  ASSERT_TRUE(decode({243, 243, 121, 7, 121, 121}, 8));
  EXPECT_EQ(decoded_, (Bytes{121, 121, 121, 121, 121, 7, 121, 121}));
  ASSERT_TRUE(decode({243, 255}, 16));
  EXPECT_EQ(decoded_, Bytes(16, 121));
}

TEST_P(ZeroRun, RefusesAnotherLength) {
  for (size_t n = 0; n <= 40; ++n) {
    EXPECT_EQ(decode({255, 1, 2, 243, 3}, n), n == 14 + 1 + 1 + 2 + 1) << n;
    EXPECT_EQ(decode({}, n), n == 0) << n;
    for (int code = 0; code < 256; ++code) {
      const size_t length = code < 243 ? 1 : static_cast<size_t>(code) - 243 + 2;
      EXPECT_EQ(decode({static_cast<uint8_t>(code)}, n), n == length) << n << " " << code;
    }
  }
}

// For any codes exactly one length is right, and nothing outside the spans is touched.
TEST_P(ZeroRun, AnyCodes) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    const Bytes codes = any_bytes(seed % 150, seed % 2 == 0 ? 0 : 235, 255, seed);
    Bytes want;
    for (uint8_t code : codes) {
      if (code < 243)
        want.push_back(code);
      else
        want.insert(want.end(), static_cast<size_t>(code) - 241, 121);
    }
    ASSERT_TRUE(decode(codes, want.size())) << seed;
    ASSERT_EQ(decoded_, want) << seed;
    ASSERT_FALSE(decode(codes, want.size() + 1)) << seed;
    for (size_t n = 0; n < want.size(); ++n) ASSERT_FALSE(decode(codes, n)) << seed << " " << n;
  }
}

}  // namespace
}  // namespace gradwire
