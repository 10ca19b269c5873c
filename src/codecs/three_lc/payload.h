#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "codecs/three_lc/three_lc.h"
#include "gradwire/status.h"

namespace gradwire {

// Where the parts of a 3lc payload lie (codecs/three_lc/spec.md):
//   scales f32[scales] | sizes u16[chunks], with zero runs and several chunks only | chunks
struct ThreeLcShape {
  uint64_t n;
  uint64_t bucket;  // values that share a scale; n where the codec has no buckets
  uint64_t scales;
  uint64_t chunks;
  bool has_sizes;

  ThreeLcShape(uint64_t values, const ThreeLcParameters& parameters) noexcept;

  [[nodiscard]] uint64_t sizes_offset() const noexcept { return scales * sizeof(float); }
  [[nodiscard]] uint64_t chunks_offset() const noexcept {
    return sizes_offset() + (has_sizes ? chunks * sizeof(uint16_t) : 0);
  }
  [[nodiscard]] uint64_t max_size() const noexcept;
  [[nodiscard]] uint64_t chunk_values(uint64_t chunk) const noexcept;
};

// Calls body(scale index, first value, number of values) for the pieces of a chunk that share a
// scale.
template <typename Body>
void for_each_scale_in_chunk(const ThreeLcShape& shape, uint64_t chunk, const Body& body) {
  uint64_t begin = chunk * kChunkValues;
  const uint64_t end = begin + shape.chunk_values(chunk);
  while (begin < end) {
    const uint64_t scale = begin / shape.bucket;
    const uint64_t stop = std::min(end, (scale + 1) * shape.bucket);
    body(scale, begin, stop - begin);
    begin = stop;
  }
}

}  // namespace gradwire
