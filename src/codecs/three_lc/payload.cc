#include "codecs/three_lc/payload.h"

#include <algorithm>

#include "stages/element.h"

namespace gradwire {

ThreeLcShape::ThreeLcShape(uint64_t values, const ThreeLcParameters& parameters) noexcept
    : n(values),
      bucket(parameters.bucket == 0 ? std::max<uint64_t>(n, 1) : parameters.bucket),
      scales(n / bucket + (n % bucket != 0)),
      chunks(n / kChunkValues + (n % kChunkValues != 0)),
      has_sizes(parameters.coder == TernaryCoder::kZeroRun && chunks > 1) {}

uint64_t ThreeLcShape::max_size() const noexcept { return chunks_offset() + packed_size(n); }

uint64_t ThreeLcShape::chunk_values(uint64_t chunk) const noexcept {
  return std::min(kChunkValues, n - chunk * kChunkValues);
}

}  // namespace gradwire
