#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "gradwire/codec.h"
#include "gradwire/execution.h"
#include "gradwire/status.h"

namespace gradwire {

// The fewest and the most bytes that a number of values in a chunk take.
struct ChunkSize {
  uint64_t least;
  uint64_t most;

  ChunkSize(uint64_t exact) : least(exact), most(exact) {}
  ChunkSize(uint64_t fewest, uint64_t room) : least(fewest), most(room) {}
};

// The offsets of a payload's parts (spec/format.md, Chunks):
//   head | sizes of the chunks, where they vary and there are several | chunks
// A chunk's size is a u16 where `full_room` fits into it, else a u32.
struct ChunkShape {
  uint64_t n;
  uint64_t head_size;
  uint64_t chunks;
  uint64_t full_room;  // bytes that a chunk of kChunkValues takes at most
  uint64_t last_room;  // bytes that the last chunk takes at most
  bool varying;
  uint64_t size_width = 0;  // bytes of a listed size; 0: none is listed
  uint64_t least_size;      // bytes of the smallest payload that is not empty

  // size(values): the ChunkSize of that many values. Sizes vary where a full chunk's may vary.
  template <typename Size>
  ChunkShape(uint64_t values, uint64_t head, const Size& size)
      : n(values),
        head_size(head),
        chunks(values / kChunkValues + (values % kChunkValues != 0)),
        least_size(head) {
    const ChunkSize full = size(kChunkValues);
    const ChunkSize last = chunks == 0 ? 0 : size(values - (chunks - 1) * kChunkValues);
    full_room = full.most;
    last_room = last.most;
    varying = full.least != full.most;
    if (varying && chunks > 1) size_width = full_room <= UINT16_MAX ? 2 : 4;
    if (chunks > 0) least_size = chunks_offset() + (chunks - 1) * full.least + last.least;
  }

  [[nodiscard]] uint64_t chunks_offset() const noexcept { return head_size + chunks * size_width; }
  [[nodiscard]] uint64_t max_size() const noexcept {
    return chunks == 0 ? head_size : chunks_offset() + (chunks - 1) * full_room + last_room;
  }

  [[nodiscard]] uint64_t begin(uint64_t chunk) const noexcept { return chunk * kChunkValues; }
  [[nodiscard]] uint64_t values(uint64_t chunk) const noexcept {
    return std::min(kChunkValues, n - chunk * kChunkValues);
  }
  [[nodiscard]] uint64_t room(uint64_t chunk) const noexcept {
    return chunk + 1 == chunks ? last_room : full_room;
  }
};

// Fills the chunks of a payload, and their sizes; the caller writes the head. one(chunk, slot)
// codes a chunk into `slot`, where room(chunk) bytes may be written, and returns its size. Returns
// the payload's size.
//
// One thread writes each chunk directly after the previous chunk. Several threads write each chunk
// to the place that it would have if no chunk had shrunk, and move it later; so they don't wait for
// each other, and no scratch is needed.
template <typename One>
uint64_t encode_chunks(const ChunkShape& shape, std::span<std::byte> payload, Execution& execution,
                       const One& one) {
  std::byte* slots = payload.data() + shape.chunks_offset();
  std::byte* sizes = payload.data() + shape.head_size;
  const bool in_order = execution.goes_in_order(shape.chunks);
  uint64_t end = 0;  // of the previous chunk, where chunks are written in order
  execution.for_each(shape.chunks, [&](size_t chunk) {
    const uint64_t at = in_order ? end : chunk * shape.full_room;
    const uint64_t size = one(chunk, reinterpret_cast<uint8_t*>(slots + at));
    if (shape.size_width == 2) store_le(sizes + chunk * 2, static_cast<uint16_t>(size));
    if (shape.size_width == 4) store_le(sizes + chunk * 4, static_cast<uint32_t>(size));
    if (in_order) end += size;
  });
  if (in_order) return shape.chunks_offset() + end;
  if (!shape.varying) return shape.max_size();
  for (uint64_t chunk = 0; chunk < shape.chunks; ++chunk) {
    const uint64_t size = shape.size_width == 2 ? load_le<uint16_t>(sizes + chunk * 2)
                                                : load_le<uint32_t>(sizes + chunk * 4);
    std::memmove(slots + end, slots + chunk * shape.full_room, size);
    end += size;
  }
  return shape.chunks_offset() + end;
}

// Where each chunk of a received payload begins after chunks_offset(), and last their total size.
// kCorruptPayload unless they fill the payload. `name` is the codec's, for messages.
Result<std::vector<uint64_t>> find_chunks(const ChunkShape& shape,
                                          std::span<const std::byte> payload,
                                          std::string_view name);

// "chunk 3 holds bytes that ..."
Status corrupt_chunk(std::string_view name, uint64_t chunk);

// Calls one(chunk, bytes) for each chunk of a received payload; false: the bytes are not valid.
template <typename One>
Status decode_chunks(const ChunkShape& shape, std::span<const std::byte> payload,
                     std::string_view name, Execution& execution, const One& one) {
  GW_ASSIGN_OR_RETURN(const std::vector<uint64_t> starts, find_chunks(shape, payload, name));
  const std::span<const std::byte> coded = payload.subspan(shape.chunks_offset());
  std::atomic<uint64_t> first_bad{shape.chunks};
  execution.for_each(shape.chunks, [&](size_t chunk) {
    const uint64_t begin = starts[chunk];
    const uint64_t size = starts[chunk + 1] - begin;
    if (one(chunk, std::span(reinterpret_cast<const uint8_t*>(coded.data() + begin), size))) return;
    uint64_t seen = first_bad.load();
    while (chunk < seen && !first_bad.compare_exchange_weak(seen, chunk)) {
    }
  });
  if (first_bad.load() == shape.chunks) return {};
  return corrupt_chunk(name, first_bad.load());
}

}  // namespace gradwire
