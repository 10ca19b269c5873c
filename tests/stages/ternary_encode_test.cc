#include "stages/element/float_bits.h"
#include "stages/trits/trit.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

using Bytes = std::vector<uint8_t>;

// Packing and zero-run coding in one pass must equal the two steps, which have tests of their own.
class TernaryEncode : public StageTest {
 protected:
  static Bytes zero_run_encoded(const Bytes& packed) {
    Bytes codes(packed.size());
    codes.resize(scalar().zero_run_encode(packed.data(), packed.size(), codes.data()));
    return codes;
  }

  // The codes that `encode` writes to a guarded span.
  template <typename Function>
  Bytes codes_of(size_t n, Edge edge, Function encode) {
    uint8_t* codes = codes_.take(packed_size(n), edge);
    const size_t size = encode(codes);
    EXPECT_TRUE(codes_.outside_untouched());
    EXPECT_LE(size, packed_size(n));
    return Bytes(codes, codes + size);
  }

  void expect_equals_two_steps(const std::vector<float>& x, std::vector<float> r, float m) {
    const size_t n = x.size();
    const Edge edge = kEdges[n % 2];
    std::vector<uint16_t> r16(n);
    scalar().narrow_bf16(r.data(), n, r16.data());
    const float* px = x_.take_copy(x, edge);
    float* pr = r_.take_copy(r, edge);
    uint16_t* pr16 = r16_.take_copy(r16, edge);
    const Bytes codes = codes_of(
        n, edge, [&](uint8_t* out) { return kernels().ternary_encode(px, {}, n, m, out); });
    const Bytes codes_f32 = codes_of(
        n, edge, [&](uint8_t* out) { return kernels().ternary_encode(px, pr, n, m, out); });
    const Bytes codes_bf16 = codes_of(
        n, edge, [&](uint8_t* out) { return kernels().ternary_encode(px, pr16, n, m, out); });

    Bytes packed(packed_size(n));
    scalar().ternary_pack(x.data(), {}, n, m, packed.data());
    EXPECT_EQ(codes, zero_run_encoded(packed));
    scalar().ternary_pack(x.data(), r.data(), n, m, packed.data());
    EXPECT_EQ(codes_f32, zero_run_encoded(packed));
    EXPECT_SAME_BITS(r_.copy(), r);
    scalar().ternary_pack(x.data(), r16.data(), n, m, packed.data());
    EXPECT_EQ(codes_bf16, zero_run_encoded(packed));
    EXPECT_EQ(r16_.copy(), r16);
    EXPECT_TRUE(r_.outside_untouched() && r16_.outside_untouched());
  }

  Guarded<float> x_{41000};
  Guarded<float> r_{41000};
  Guarded<uint16_t> r16_{41000};
  Guarded<uint8_t> codes_{8200};
};
GRADWIRE_FOR_EACH_TABLE(TernaryEncode);

TEST_P(TernaryEncode, GoldenCodes) {
  // 201, three zero bytes, 242, and one value more: -1 and four zeros of padding.
  std::vector<float> x = {4, 0, 0, 0, -4};
  x.resize(20);
  x.insert(x.end(), {4, 4, 4, 4, 4, -4});
  Bytes codes(packed_size(x.size()));
  codes.resize(kernels().ternary_encode(x.data(), {}, x.size(), 4.0f, codes.data()));
  EXPECT_EQ(codes, (Bytes{201, 244, 242, 40}));
}

TEST_P(TernaryEncode, EqualsTheTwoSteps) {
  std::vector<size_t> all = lengths();
  for (size_t n : {2559u, 2560u, 2561u, 2880u, 5120u, 5300u}) all.push_back(n);  // groups of blocks
  for (size_t n : all) {
    if (n > kMaxRunInput * kTritsPerByte) continue;
    SCOPED_TRACE(n);
    const uint32_t seed = static_cast<uint32_t>(n);
    const auto x = gradient_like(n, seed);
    const float a = float_of(scalar().absmax(x.data(), {}, n));
    expect_equals_two_steps(x, gradient_like(n, seed + 1), n % 3 == 0 ? 0.05f * a : 0.7f * a);
    if (HasFailure()) return;
  }
}

TEST_P(TernaryEncode, AllZero) {
  for (size_t n : {1u, 70u, 71u, 320u, 2560u, 2561u, 40960u}) {
    expect_equals_two_steps(std::vector<float>(n, 0.0f), std::vector<float>(n, -0.0f), 1.0f);
  }
}

}  // namespace
}  // namespace gradwire
