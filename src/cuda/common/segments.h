#pragma once

// The segments of a bucket, as kernels see them. The host writes the table once (bucket_codec.cu).

#include <cstdint>

#include "base/host_device.h"
#include "codecs/chunks.h"

namespace gradwire::cuda {

struct Segment {
  uint64_t begin;  // of its values in the bucket
  uint64_t n;
  uint64_t draw_stream;
  uint64_t group_size;   // consecutive values that share a scale
  uint32_t first_chunk;  // in the numbering of all chunks of the call
  uint32_t chunks;
  uint32_t first_scale;  // in the numbering of all scales of the call
  uint32_t scales;

  // The shape of its payload (codecs/chunks.h): scales, sizes of the chunks, chunks.
  uint64_t payload;     // where it begins, with room for the largest
  uint64_t least_size;  // if it is not empty
  uint64_t largest_size;
  uint64_t scales_size;  // of all scales
  uint32_t size_width;   // of a listed size; 0: none is listed
  uint32_t full_room;    // most bytes of a chunk of kChunkValues
  uint32_t last_room;    // most bytes of the last chunk
  bool may_be_empty;

  [[nodiscard]] GW_HOST_DEVICE uint64_t chunks_at() const {
    return scales_size + uint64_t{size_width} * chunks;
  }
  [[nodiscard]] GW_HOST_DEVICE uint32_t room(uint32_t chunk) const {
    return chunk + 1 == chunks ? last_room : full_room;
  }
  [[nodiscard]] GW_HOST_DEVICE bool may_have(uint64_t size) const {
    return size == 0 ? may_be_empty : least_size <= size && size <= largest_size;
  }

  [[nodiscard]] GW_HOST_DEVICE uint64_t values_of(uint32_t chunk) const {
    const uint64_t rest = n - chunk * kChunkValues;
    return rest < kChunkValues ? rest : kChunkValues;
  }
  [[nodiscard]] GW_HOST_DEVICE uint64_t values_of_group(uint64_t group) const {
    const uint64_t rest = n - group * group_size;
    return rest < group_size ? rest : group_size;
  }
};

// The table in device memory.
struct Segments {
  const Segment* segments;
  const uint32_t* segment_of_chunk;
  uint32_t count;
  uint32_t chunks;
  uint32_t scales;

  // The last segment for which first(segment) is at most `number`. So segments in which nothing is
  // numbered are passed over, as the next one begins with the same number.
  template <typename First>
  [[nodiscard]] GW_HOST_DEVICE uint32_t find(uint64_t number, const First& first) const {
    uint32_t low = 0;
    uint32_t high = count;
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      (first(segments[middle]) <= number ? low : high) = middle;
    }
    return low;
  }
};

GW_HOST_DEVICE inline uint32_t segment_of_scale(const Segments& segments, uint32_t scale) {
  return segments.find(scale, [](const Segment& segment) { return segment.first_scale; });
}

// A chunk, as the block that handles it sees it.
struct Chunk {
  Segment segment;
  uint32_t number;      // in the numbering of all chunks of the call
  uint32_t index;       // of the segment
  uint32_t of_segment;  // which of its chunks
  uint32_t n;
  uint64_t first;  // value, in the segment
  uint64_t begin;  // of the same value in the bucket

  GW_HOST_DEVICE static Chunk create(const Segments& segments, uint32_t number) {
    const uint32_t index = segments.segment_of_chunk[number];
    const Segment segment = segments.segments[index];
    const uint32_t of_segment = number - segment.first_chunk;
    const uint64_t first = of_segment * kChunkValues;
    return {.segment = segment,
            .number = number,
            .index = index,
            .of_segment = of_segment,
            .n = static_cast<uint32_t>(segment.values_of(of_segment)),
            .first = first,
            .begin = segment.begin + first};
  }

  // The scales whose groups begin in the chunk, in the segment's numbering.
  [[nodiscard]] GW_HOST_DEVICE uint64_t first_scale() const {
    return (first + segment.group_size - 1) / segment.group_size;
  }
  [[nodiscard]] GW_HOST_DEVICE uint64_t end_scale() const {
    return (first + n + segment.group_size - 1) / segment.group_size;
  }
};

// Finds the scales of a chunk's values, in the segment's numbering, without a division for each.
class ScaleOf {
 public:
  GW_HOST_DEVICE explicit ScaleOf(const Chunk& chunk)
      : group_size_(chunk.segment.group_size),
        first_(chunk.segment.scales > 1 ? chunk.first / group_size_ : 0),
        offset_(chunk.first - first_ * group_size_),
        inverse_(group_size_ <= kMostDivided ? (uint64_t{1} << 32) / group_size_ + 1 : 0) {}

  GW_HOST_DEVICE uint64_t operator()(uint32_t at) const {
    const uint64_t value = offset_ + at;  // counted from the begin of the first value's group
    // The inverse is too large by at most group_size * 2^-32; that times the value is below 1.
    if (inverse_ != 0) return first_ + (value * inverse_ >> 32);
    return first_ + (value >= group_size_ ? 1 : 0) + (value >= 2 * group_size_ ? 1 : 0);
  }

 private:
  static constexpr uint64_t kMostDivided = 32768;
  static_assert((kMostDivided + kChunkValues) * kMostDivided < uint64_t{1} << 32);
  static_assert(kChunkValues < 2 * kMostDivided);

  uint64_t group_size_;
  uint64_t first_;   // the scale of the chunk's first value
  uint64_t offset_;  // of that value in its group
  uint64_t inverse_;
};

}  // namespace gradwire::cuda
