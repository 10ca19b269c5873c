#pragma once

// Inputs of the stages' tests, and comparisons of their results.

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "stages/element/bfloat16.h"
#include "stages/kernels.h"

namespace gradwire {

using enum DecodeMode;

// Each test runs once for each kernel table that this CPU can run.
class StageTest : public testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels() const { return *GetParam(); }
  static const Kernels& scalar() { return *find_kernels("scalar"); }
};

inline std::string table_name(const testing::TestParamInfo<const Kernels*>& info) {
  return info.param->name;
}

#define GRADWIRE_FOR_EACH_TABLE(suite)                                                           \
  INSTANTIATE_TEST_SUITE_P(                                                                      \
      Targets, suite, testing::ValuesIn(available_kernels().begin(), available_kernels().end()), \
      table_name)

// Every length up to 700 (two blocks of 320 values and more), and some around whole chunks.
inline std::vector<size_t> lengths() {
  std::vector<size_t> all;
  for (size_t n = 0; n <= 700; ++n) all.push_back(n);
  for (size_t n : {4095u, 8192u, 40955u, 40959u, 40960u, 40961u}) all.push_back(n);
  return all;
}

// Heavy-tailed values, like gradients. They are cut from one long series, because drawing them
// takes most of the time of these tests.
inline std::vector<float> gradient_like(size_t n, uint32_t seed) {
  static const std::vector<float> series = [] {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> values(1u << 16);
    for (float& value : values) value = 1e-3f * normal(random) * std::exp(normal(random));
    return values;
  }();
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = series[(i + size_t{seed} * 7919) % series.size()];
  return values;
}

inline std::vector<uint16_t> narrowed(const std::vector<float>& x) {
  std::vector<uint16_t> narrow;
  for (float value : x) narrow.push_back(narrow_bf16(value));
  return narrow;
}

// Any 32 bits as a float, NaNs left out.
inline std::vector<float> any_numbers(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(n);
  for (float& value : values) {
    do value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    while (std::isnan(value));
  }
  return values;
}

// Signed zeros, smallest and largest denormals, normals, infinities; NaN is not among them.
inline std::vector<float> special_numbers() {
  using limits = std::numeric_limits<float>;
  std::vector<float> values;
  for (float magnitude :
       {0.0f, limits::denorm_min(), std::nextafter(FLT_MIN, 0.0f), FLT_MIN, 1e-20f, 0.5f, 1.0f,
        std::nextafter(1.0f, 2.0f), 2.0f, FLT_MAX / 2, FLT_MAX, limits::infinity()}) {
    values.push_back(magnitude);
    values.push_back(-magnitude);
  }
  return values;
}

inline std::vector<uint8_t> any_bytes(size_t n, unsigned first, unsigned last, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<unsigned> byte(first, last);
  std::vector<uint8_t> bytes(n);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(byte(random));
  return bytes;
}

// Packed bytes of which about one in `one_in` is not 121, the byte of five zeros.
inline std::vector<uint8_t> sparse_bytes(size_t n, unsigned one_in, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(n, 121);
  for (uint8_t& b : bytes) {
    if (random() % one_in == 0) b = static_cast<uint8_t>(random() % 243);
  }
  return bytes;
}

inline std::vector<uint32_t> bits_of_all(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

// Compare bit for bit, so that -0 differs from 0.
#define EXPECT_SAME_BITS(a, b) EXPECT_EQ(bits_of_all(a), bits_of_all(b))
#define ASSERT_SAME_BITS(a, b) ASSERT_EQ(bits_of_all(a), bits_of_all(b))

}  // namespace gradwire
