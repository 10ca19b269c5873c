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
  constexpr DrawStream kPlaces = DrawStream::create(0, 0, 0);
  float magnitudes[kSamples];
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t begin = n / count * i + n % count * i / count;
    const uint64_t end = n / count * (i + 1) + n % count * (i + 1) / count;
    const uint64_t at = begin + (uint64_t{kPlaces.word(i)} * (end - begin) >> 32);
    magnitudes[i] = std::abs(input.at(at));
  }
  const auto wanted = static_cast<uint64_t>(std::lround(fraction * static_cast<float>(count)));
  const uint64_t rank = std::clamp<uint64_t>(wanted, 1, count) - 1;
  std::nth_element(magnitudes, magnitudes + rank, magnitudes + count, std::greater<>());
  return std::max(magnitudes[rank], std::numeric_limits<float>::denorm_min());
}

}  // namespace gradwire
