#include "codecs/threshold.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "stages/element/float_bits.h"
#include "stages/threshold/sample.h"

namespace gradwire {
namespace {

// The magnitude bits at `rank` (0: the largest) among count <= kSamples; they are in the order of
// the magnitudes. Counting them by their upper bits leaves few to sort.
uint32_t ranked(const uint32_t* magnitudes, uint64_t count, uint64_t rank) {
  constexpr int kLowerBits = 20;
  uint16_t counts[1 << (31 - kLowerBits)] = {};
  const auto upper = [=](uint64_t i) { return magnitudes[i] >> kLowerBits; };
  for (uint64_t i = 0; i < count; ++i) ++counts[upper(i)];
  uint32_t wanted = std::size(counts) - 1;
  while (rank >= counts[wanted]) rank -= counts[wanted--];
  uint32_t left[kSamples];
  uint64_t size = 0;
  for (uint64_t i = 0; i < count; ++i) {
    left[size] = magnitudes[i];
    size += upper(i) == wanted ? 1 : 0;
  }
  std::nth_element(left, left + rank, left + size, std::greater<>());
  return left[rank];
}

}  // namespace

float sample_threshold(const Input& input, float fraction) {
  if (fraction >= 1.0f) return least_threshold(0.0f);
  const uint64_t n = input.size();
  const uint64_t count = std::min(n, kSamples);
  uint32_t places[kSamples];
  input.kernels().draw_words(sample_draws(), 0, count, places);
  uint32_t magnitudes[kSamples];
  for (uint64_t i = 0; i < count; ++i) {
    magnitudes[i] = magnitude_bits(input.at(sample_place(n, i, places[i])));
  }
  return least_threshold(float_of(ranked(magnitudes, count, sample_rank(fraction, count))));
}

}  // namespace gradwire
