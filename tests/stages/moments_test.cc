#include "stages/magnitude/moments.h"

#include "stages/element/float_bits.h"
#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

class MomentsOf : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(MomentsOf);

TEST_P(MomentsOf, GoldenSums) {
  const std::vector<float> x = {1, 2, 3, -4};
  const Moments four = kernels().moments(x.data(), 4);
  EXPECT_EQ(four.sum, 2.0);
  EXPECT_EQ(four.squares, 30.0);
  EXPECT_EQ(four.largest, bits_of(4.0f));
  const Moments none = kernels().moments(x.data(), 0);
  EXPECT_EQ(none.sum, 0.0);
  EXPECT_EQ(none.squares, 0.0);
  EXPECT_EQ(none.largest, 0u);
}

// The values are 2^60 apart, so that any other order of the additions gives other bits.
TEST_P(MomentsOf, OrderIsTheDefinition) {
  Guarded<float> x(41000);
  for (size_t n : lengths()) {
    auto values = gradient_like(n, static_cast<uint32_t>(n));
    for (size_t i = 0; i < n; ++i) values[i] = std::ldexp(values[i], static_cast<int>(i % 7) * 10);
    const Moments want = find_kernels("scalar")->moments(values.data(), n);
    const Moments got = kernels().moments(x.take_copy(values, kEdges[n % 2]), n);
    ASSERT_EQ(got.sum, want.sum) << n;
    ASSERT_EQ(got.squares, want.squares) << n;
    ASSERT_EQ(got.largest, scalar().absmax(values.data(), {}, n)) << n;
  }
}

}  // namespace
}  // namespace gradwire
