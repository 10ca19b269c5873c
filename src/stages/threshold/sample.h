#pragma once

// The sample of a tensor's values that a threshold is taken from (spec/format.md, topk). Rules as
// in stages/element/float_bits.h.

#include <cstdint>

#include "base/host_device.h"
#include "base/philox.h"

namespace gradwire {

// Number of samples of a tensor: one from each of as many strata of equal size.
inline constexpr uint64_t kSamples = 4096;

// The random words that choose a place in each stratum. They are always the same, but irregular, so
// that the places don't fall in step with a tensor's rows.
GW_HOST_DEVICE constexpr DrawStream sample_draws() { return DrawStream::create(0, 0, 0); }

// The index of the i-th sample among n values; `word` is the sample's random word.
GW_HOST_DEVICE constexpr uint64_t sample_place(uint64_t n, uint64_t i, uint32_t word) {
  if (n < kSamples) return i;
  const uint64_t begin = n / kSamples * i + n % kSamples * i / kSamples;
  const uint64_t end = n / kSamples * (i + 1) + n % kSamples * (i + 1) / kSamples;
  return begin + (word * (end - begin) >> 32);
}

// The rank (0: the largest), among count <= kSamples magnitudes, of the smallest magnitude that
// `fraction` of them reach. Their number is rounded half up.
GW_HOST_DEVICE constexpr uint64_t sample_rank(float fraction, uint64_t count) {
  const float share = fraction * static_cast<float>(count);
  const auto below = static_cast<uint64_t>(share);
  const uint64_t wanted = share - static_cast<float>(below) >= 0.5f ? below + 1 : below;
  return (wanted < 1 ? 1 : wanted > count ? count : wanted) - 1;
}

// A threshold is at least the smallest denormal, so that a zero never reaches it.
GW_HOST_DEVICE constexpr float least_threshold(float magnitude) {
  return magnitude > 0x1p-149f ? magnitude : 0x1p-149f;
}

}  // namespace gradwire
