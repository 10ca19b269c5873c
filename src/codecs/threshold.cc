#include "codecs/threshold.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/philox.h"

namespace gradwire {
namespace {

constexpr uint64_t kSamples = 4096;

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
  std::nth_element(magnitudes, magnitudes + rank, magnitudes + count, std::greater<>());
  return std::max(magnitudes[rank], std::numeric_limits<float>::denorm_min());
}

}  // namespace gradwire
