#pragma once

// Where the chunks of a payload lie if their sizes vary (spec/format.md, Chunks): a head with
// scales, the chunks' sizes if there are several chunks, and the chunks. A layout says what is
// special about a codec:
//
//   struct Layout {
//     static constexpr uint32_t kScaleBytes;        // in the head, for each scale
//     __device__ uint32_t room(uint32_t n) const;   // most bytes of a chunk of n values
//     __device__ uint32_t least(uint32_t n) const;  // fewest bytes of such a chunk
//     static constexpr uint64_t kExtra;             // bytes of a payload beside its chunks' fewest
//     __device__ bool varying() const;              // false: each chunk has the size room(n)
//     static constexpr bool kEmptyIsZeros;          // an empty payload stands for zeros
//   };

#include <cstdint>

#include "cuda/common/segments.h"

namespace gradwire::cuda {

// Where the list of sizes begins in a payload.
template <typename Layout>
__device__ inline uint64_t sizes_offset(const Segment& segment) {
  return uint64_t{Layout::kScaleBytes} * segment.scales;
}

// Bytes of a listed size; 0: none is listed.
template <typename Layout>
__device__ inline uint32_t size_width(const Layout& layout, const Segment& segment) {
  if (!layout.varying() || segment.chunks < 2) return 0;
  return layout.room(kChunkValues) <= UINT16_MAX ? 2 : 4;
}

// Where the chunks of a payload begin in it.
template <typename Layout>
__device__ inline uint64_t chunks_offset(const Layout& layout, const Segment& segment) {
  return sizes_offset<Layout>(segment) + uint64_t{size_width(layout, segment)} * segment.chunks;
}

}  // namespace gradwire::cuda
