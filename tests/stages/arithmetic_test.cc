#include <cstring>

#include "tests/stages/guarded.h"
#include "tests/stages/inputs.h"

namespace gradwire {
namespace {

// Whether the bits are equal or both values are NaN.
bool same_number(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) ||
         std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

class Arithmetic : public StageTest {};
GRADWIRE_FOR_EACH_TABLE(Arithmetic);

TEST_P(Arithmetic, SumsAndSubtractsWithinItsSpansAndInPlace) {
  Guarded<float> x(41000);
  Guarded<float> out(41000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const auto a = any_numbers(n, static_cast<uint32_t>(n));
    const auto b = gradient_like(n, 1);
    auto want = b;
    for (size_t i = 0; i < n; ++i) want[i] = a[i] - b[i];
    float* from = x.take_copy(b, edge);
    float* to = out.take_copy(a, edge);
    kernels().subtract(to, from, n, to);
    ASSERT_SAME_BITS(out.copy(), want) << n;
    ASSERT_TRUE(out.outside_untouched()) << n;
    for (size_t i = 0; i < n; ++i) want[i] = a[i] + b[i];
    to = out.take_copy(a, edge);
    kernels().sum(to, from, n, to);
    ASSERT_SAME_BITS(out.copy(), want) << n;
    ASSERT_TRUE(out.outside_untouched()) << n;
  }
}

// Payloads of frames lie at any address.
TEST_P(Arithmetic, AddsFromOddAddresses) {
  for (size_t n = 0; n < 70; ++n) {
    const auto x = gradient_like(n, 2);
    std::vector<uint8_t> bytes(4 * n + 1);
    if (n != 0) std::memcpy(bytes.data() + 1, x.data(), 4 * n);
    std::vector<float> out(n, 1.0f);
    const auto* odd = reinterpret_cast<const float*>(bytes.data() + 1);
    kernels().sum(out.data(), odd, n, out.data());
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(out[i], 1.0f + x[i]) << n;
  }
}

// A product with the reciprocal would differ in the last bit for some of these.
TEST_P(Arithmetic, DividesTrulyWithinItsSpan) {
  Guarded<float> x(41000);
  for (size_t n : lengths()) {
    const Edge edge = kEdges[n % 2];
    const auto a = gradient_like(n, static_cast<uint32_t>(n));
    const float divisor = static_cast<float>(n % 32 + 1);
    auto want = a;
    for (float& value : want) value = value / divisor;
    kernels().divide(x.take_copy(a, edge), n, divisor);
    ASSERT_SAME_BITS(x.copy(), want) << n;
    ASSERT_TRUE(x.outside_untouched()) << n;
  }
}

TEST_P(Arithmetic, SpecialNumbers) {
  for (float b : special_numbers()) {
    auto sums = special_numbers();
    auto quotients = special_numbers();
    const std::vector<float> more(sums.size(), b);
    kernels().sum(sums.data(), more.data(), sums.size(), sums.data());
    kernels().divide(quotients.data(), quotients.size(), b);
    for (size_t i = 0; i < sums.size(); ++i) {
      const float a = special_numbers()[i];
      ASSERT_TRUE(same_number(sums[i], a + b)) << a << " + " << b;
      ASSERT_TRUE(same_number(quotients[i], a / b)) << a << " / " << b;
    }
  }
}

}  // namespace
}  // namespace gradwire
