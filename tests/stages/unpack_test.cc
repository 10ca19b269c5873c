#include "stages/element/float_bits.h"
#include "stages/ternary/nearest_trit.h"
#include "stages/trits/trit.h"
#include "stages/zero_run/zero_run.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;

class Unpack : public StageTest {
 protected:
  // Runs the four functions on the same bytes, as packed bytes and, where possible, as zero-run
  // codes. `before` holds the values to which they add.
  struct Result {
    bool ok, add_ok;
    Floats out, sum;
    friend bool operator==(const Result&, const Result&) = default;
  };

  Result from_packed(const Kernels& table, const Bytes& packed, const Floats& before, float m) {
    return run(packed, before, [&](DecodeMode mode, const uint8_t* bytes, float* out) {
      return table.unpack(bytes, before.size(), m, out, mode);
    });
  }

  Result from_codes(const Kernels& table, const Bytes& codes, const Floats& before, float m) {
    return run(codes, before, [&](DecodeMode mode, const uint8_t* bytes, float* out) {
      return table.zero_run_unpack(bytes, codes.size(), before.size(), m, out, mode);
    });
  }

  template <typename Function>
  Result run(const Bytes& bytes, const Floats& before, Function function) {
    Result result{};
    const Edge edge = bytes.size() % 2 == 0 ? Edge::kEnd : Edge::kStart;
    const uint8_t* in = in_.take_copy(bytes, edge);
    result.ok = function(kStore, in, out_.take_copy(before, edge));
    EXPECT_TRUE(out_.outside_untouched());
    result.out = out_.copy();
    result.add_ok = function(kAdd, in, out_.take_copy(before, edge));
    EXPECT_TRUE(out_.outside_untouched());
    result.sum = out_.copy();
    return result;
  }

  static void expect_same(const Result& got, const Result& want) {
    EXPECT_TRUE(got.ok && want.ok && got.add_ok && want.add_ok);
    EXPECT_SAME_BITS(got.out, want.out);
    EXPECT_SAME_BITS(got.sum, want.sum);
  }

  Bytes encoded(const Bytes& packed) {
    Bytes codes(packed.size());
    codes.resize(scalar().zero_run_encode(packed.data(), packed.size(), codes.data()));
    return codes;
  }

  // Bytes for n values, zero trits as padding.
  static Bytes padded(Bytes packed, size_t n) {
    if (n % 5 != 0) {
      const int weight = n % 5 == 1 ? 81 : n % 5 == 2 ? 27 : n % 5 == 3 ? 9 : 3;
      packed.back() = static_cast<uint8_t>(packed.back() / weight * weight + weight / 2);
    }
    return packed;
  }

  Guarded<uint8_t> in_{17000};
  Guarded<float> out_{41000};
};
GRADWIRE_FOR_EACH_TABLE(Unpack);

TEST_P(Unpack, GoldenValues) {
  const Floats before = {1, 2, 3, 4, 5, -0.0f, 7};
  const Bytes packed = {201, 40};  // + 0 0 0 - | - 0 0 0 0
  for (const Result& result : {from_packed(kernels(), packed, before, 0.5f),
                               from_codes(kernels(), packed, before, 0.5f)}) {
    EXPECT_TRUE(result.ok && result.add_ok);
    EXPECT_SAME_BITS(result.out, (Floats{0.5f, 0, 0, 0, -0.5f, -0.5f, 0}));
    EXPECT_SAME_BITS(result.sum, (Floats{1.5f, 2, 3, 4, 4.5f, -0.5f, 7}));
  }
}

TEST_P(Unpack, GoldenRuns) {
  Floats before(5 * 20, 1.0f);
  const Result result = from_codes(kernels(), {0, 255, 121, 242, 244}, before, 2.0f);
  Floats want(before.size(), 0.0f);
  for (size_t i = 0; i < 5; ++i) want[i] = -2.0f;
  for (size_t i = 80; i < 85; ++i) want[i] = 2.0f;
  EXPECT_TRUE(result.ok && result.add_ok);
  EXPECT_SAME_BITS(result.out, want);
  for (float& value : want) value += 1.0f;
  EXPECT_SAME_BITS(result.sum, want);
}

// All 256 bytes at several places against the trits by plain division.
TEST_P(Unpack, EveryByte) {
  const float m = 3.0f;
  for (size_t place : {0u, 1u, 15u, 64u, 100u}) {
    for (unsigned byte = 0; byte < 256; ++byte) {
      const Floats before = gradient_like(5 * (place + 20), byte);
      Bytes packed(place + 20, 121);
      packed[place] = static_cast<uint8_t>(byte);
      const Result result = from_packed(kernels(), packed, before, m);
      ASSERT_EQ(result.ok, byte < 243) << byte;
      ASSERT_EQ(result.add_ok, byte < 243) << byte;
      if (byte >= 243) continue;
      Floats want(before.size(), 0.0f);
      Floats want_sum = before;
      unsigned weight = 81;
      for (size_t i = 5 * place; i < 5 * place + 5; ++i, weight /= 3) {
        const int trit = static_cast<int>(byte / weight % 3) - 1;
        if (trit != 0) want[i] = static_cast<float>(trit) * m;
        if (trit != 0) want_sum[i] += static_cast<float>(trit) * m;
      }
      ASSERT_SAME_BITS(result.out, want) << byte;
      ASSERT_SAME_BITS(result.sum, want_sum) << byte;
    }
  }
}

TEST_P(Unpack, AllLengthsAndDensities) {
  for (size_t n : lengths()) {
    const uint32_t seed = static_cast<uint32_t>(n);
    const Floats before = gradient_like(n, seed);
    for (unsigned one_in : {1u, 4u, 30u}) {
      SCOPED_TRACE(testing::Message() << n << " " << one_in);
      const Bytes packed = padded(sparse_bytes(packed_size(n), one_in, seed), n);
      const Bytes codes = encoded(packed);
      const Result want = from_packed(scalar(), packed, before, 0.01f);
      expect_same(from_packed(kernels(), packed, before, 0.01f), want);
      expect_same(from_codes(kernels(), codes, before, 0.01f), want);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Unpack, ZeroTritsLeaveEveryNumberAsItIs) {
  const Floats special = special_numbers();
  Floats before;
  for (int i = 0; i < 40; ++i) before.insert(before.end(), special.begin(), special.end());
  before.resize(before.size() / 5 * 5);
  const Bytes zeros(before.size() / 5, 121);
  for (float m : {0.0f, 1e-44f, 1.0f, FLT_MAX}) {
    EXPECT_SAME_BITS(from_packed(kernels(), zeros, before, m).sum, before);
    EXPECT_SAME_BITS(from_codes(kernels(), zeros, before, m).sum, before);
    EXPECT_SAME_BITS(from_codes(kernels(), encoded(zeros), before, m).sum, before);
    // This includes the neighbours of one or two trits in a byte.
    for (int first = 0; first < 5; ++first) {
      for (int second = first; second < 5; ++second) {
        const int weight = trit_weight(first) - (first == second ? 0 : trit_weight(second));
        const Bytes packed(before.size() / 5, static_cast<uint8_t>(121 + weight));
        const Result result = from_codes(kernels(), packed, before, m);
        expect_same(result, from_codes(scalar(), packed, before, m));
        for (size_t i = 0; i < before.size(); ++i) {
          const int place = static_cast<int>(i % 5);
          if (place == first || place == second) continue;
          ASSERT_EQ(bits_of(result.sum[i]), bits_of(before[i])) << i;
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Unpack, MultiplierZeroAndExtremes) {
  const Bytes packed = any_bytes(200, 0, 242, 1);
  for (float m : {0.0f, 1e-45f, FLT_MIN, FLT_MAX}) {
    SCOPED_TRACE(m);
    for (const Floats& before : {Floats(1000, -0.0f), Floats(1000, 0.0f), any_numbers(1000, 5)}) {
      const Result want = from_packed(scalar(), packed, before, m);
      expect_same(from_packed(kernels(), packed, before, m), want);
      expect_same(from_codes(kernels(), packed, before, m), want);
    }
  }
}

// With n % 5 = 1..4, a trit after the last value is corrupt in every form.
TEST_P(Unpack, RefusesPaddingThatIsNotZero) {
  for (size_t n : {1u, 2u, 3u, 4u, 11u, 322u, 698u, 1279u}) {
    const Floats before(n, 1.0f);
    for (unsigned last = 0; last < 256; ++last) {
      Bytes packed(packed_size(n), 121);
      packed.back() = static_cast<uint8_t>(last);
      bool want = last < 243;
      unsigned weight = 1;
      for (size_t i = 5 * packed.size(); i > n; --i, weight *= 3) {
        want = want && last / weight % 3 == 1;
      }
      const Result result = from_packed(kernels(), packed, before, 1.0f);
      ASSERT_EQ(result.ok, want) << n << " " << last;
      ASSERT_EQ(result.add_ok, want) << n << " " << last;
      if (last >= 243) continue;  // this byte would be a run code
      const Result coded = from_codes(kernels(), packed, before, 1.0f);
      ASSERT_EQ(coded.ok, want) << n << " " << last;
      ASSERT_EQ(coded.add_ok, want) << n << " " << last;
    }
  }
}

TEST_P(Unpack, AcceptsARunOverTheLastShortByte) {
  const Floats before(13, 1.0f);
  const Result result = from_codes(kernels(), {242, 243}, before, 1.0f);
  ASSERT_TRUE(result.ok && result.add_ok);
  EXPECT_SAME_BITS(result.sum, (Floats{2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1}));
}

TEST_P(Unpack, RefusesCodesForAnotherLength) {
  for (size_t n = 0; n <= 300; ++n) {
    const Floats before(n, 1.0f);
    // 14 + 1 + 1 + 2 + 1 = 19 bytes; a run must not be cut at the end.
    const Result result = from_codes(kernels(), {255, 1, 2, 243, 242}, before, 1.0f);
    EXPECT_EQ(result.ok, n == 5 * 19) << n;
    EXPECT_EQ(result.add_ok, n == 5 * 19) << n;
    const Result nothing = from_codes(kernels(), {}, before, 1.0f);
    EXPECT_EQ(nothing.ok, n == 0) << n;
    const Result run = from_codes(kernels(), {255, 255, 250}, before, 1.0f);  // 37 bytes
    EXPECT_EQ(run.ok, packed_size(n) == 37) << n;
  }
}

// Any codes give the same result as the definition, and nothing outside the spans is touched.
TEST_P(Unpack, AnyCodes) {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    const Bytes codes = any_bytes(seed % 400, seed % 2 == 0 ? 0 : 236, 255, seed);
    size_t length = 0;
    for (uint8_t code : codes) length += static_cast<size_t>(run_length_of(code));
    // n is right, or wrong by a few values.
    const size_t n = 5 * length + seed % 13 < 6 ? 0 : 5 * length + seed % 13 - 6;
    const Floats before(n, 0.25f);
    const Result got = from_codes(kernels(), codes, before, 1.0f);
    const Result want = from_codes(scalar(), codes, before, 1.0f);
    ASSERT_EQ(got.ok, want.ok) << seed;
    ASSERT_EQ(got.add_ok, want.add_ok) << seed;
    if (want.ok) {
      ASSERT_EQ(got, want) << seed;
    }
    const Result packed = from_packed(kernels(), codes, Floats(codes.size() * 5, 0.25f), 1.0f);
    const Result plain = from_packed(scalar(), codes, Floats(codes.size() * 5, 0.25f), 1.0f);
    ASSERT_EQ(packed.ok, plain.ok) << seed;
    if (plain.ok) {
      ASSERT_EQ(packed, plain) << seed;
    }
  }
}

// If more codes follow a last byte with fewer than five values, that byte's extra trits must not be
// written, however many codes the function reads at once.
TEST_P(Unpack, OverrunBehindAShortByte) {
  for (uint8_t byte : {uint8_t{200}, uint8_t{122}}) {  // many trits, and only the last
    for (size_t bytes = 1; bytes < 1100; ++bytes) {
      Bytes codes(bytes, byte);
      codes.push_back(255);
      const Result result = from_codes(kernels(), codes, Floats(5 * bytes - 2, 1.0f), 1.0f);
      ASSERT_FALSE(result.ok || result.add_ok) << bytes;
      if (HasFailure()) return;
    }
  }
}

TEST_P(Unpack, UndoesPacking) {
  for (float sparsity : {1.0f, 1.75f}) {
    const size_t n = 40960 + 7;
    const Floats x = gradient_like(n, 3);
    const float m = ternary_multiplier(scalar().absmax(x.data(), {}, n), sparsity);
    Bytes packed(packed_size(n));
    kernels().ternary_pack(x.data(), {}, n, m, packed.data());
    const Result result = from_packed(kernels(), packed, Floats(n, 0.0f), m);
    ASSERT_TRUE(result.ok && result.add_ok);
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(result.out[i], ternary_value(ternary_trit(x[i], m * 0.5f), m)) << i;
    }
  }
}

}  // namespace
}  // namespace gradwire
