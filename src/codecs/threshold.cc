#include "codecs/threshold.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>

#include "base/philox.h"
#include "stages/element.h"

namespace gradwire {
namespace {

constexpr uint64_t kSamples = 4096;

// The one of that rank, 0 the largest, among count <= kSamples magnitudes: their bits are in the
// same order. They are counted by their upper bits, which leaves few to sort.
float ranked(const float* magnitudes, uint64_t count, uint64_t rank) {
  constexpr int kLowerBits = 20;
  uint16_t counts[1 << (31 - kLowerBits)] = {};
  const auto upper = [=](uint64_t i) { return bits_of(magnitudes[i]) >> kLowerBits; };
  for (uint64_t i = 0; i < count; ++i) ++counts[upper(i)];
  uint32_t wanted = std::size(counts) - 1;
  while (rank >= counts[wanted]) rank -= counts[wanted--];
  float left[kSamples];
  uint64_t size = 0;
  for (uint64_t i = 0; i < count; ++i) {
    left[size] = magnitudes[i];
    size += upper(i) == wanted ? 1 : 0;
  }
  std::nth_element(left, left + rank, left + size, std::greater<>());
  return left[rank];
}

}  // namespace

float sample_threshold(const Input& input, uint64_t n, float fraction) {
  const uint64_t count = std::min(n, kSamples);
  // Always the same places, but in no rhythm that a tensor's rows could have, too.
  uint32_t places[kSamples];
  input.kernels().draw_words(DrawStream::create(0, 0, 0), 0, count, places);
  const auto begin = [n](uint64_t i) {
    return n < kSamples ? i : n / kSamples * i + n % kSamples * i / kSamples;
  };
  float magnitudes[kSamples];
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t stratum = begin(i + 1) - begin(i);
    magnitudes[i] = std::abs(input.at(begin(i) + (places[i] * stratum >> 32)));
  }
  const auto wanted = static_cast<uint64_t>(std::lround(fraction * static_cast<float>(count)));
  const uint64_t rank = std::clamp<uint64_t>(wanted, 1, count) - 1;
  return std::max(ranked(magnitudes, count, rank), std::numeric_limits<float>::denorm_min());
}

}  // namespace gradwire
