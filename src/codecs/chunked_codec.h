#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/endian.h"
#include "base/private_export.h"
#include "codecs/chunks.h"
#include "codecs/groups.h"
#include "codecs/input.h"
#include "gradwire/codec.h"
#include "stages/kernels.h"

namespace gradwire {

// The parts of a payload that is cut into groups and chunks (spec/format.md, Chunks):
//   head of each group | sizes of the chunks | chunks
// A group's head holds its scale. Where all heads are 0 the payload is empty.
struct ChunkedShape {
  Groups groups;
  ChunkShape chunks;

  // head_width: bytes of a group's head, 0 where there is none. size: as ChunkShape.
  template <typename Size>
  ChunkedShape(const Groups& grouping, uint64_t head_width, const Size& size)
      : groups(grouping), chunks(grouping.n, grouping.count * head_width, size) {}

  [[nodiscard]] uint64_t max_size() const { return chunks.max_size(); }
  // Bytes of all heads.
  [[nodiscard]] uint64_t heads_size() const { return chunks.head_size; }
  [[nodiscard]] uint64_t head_at(uint64_t group) const {
    return group * (heads_size() / groups.count);
  }

  // Calls body(group, first value in the chunk, number of values) for the chunk's pieces.
  template <typename Body>
  void for_each_piece(uint64_t chunk, const Body& body) const {
    const uint64_t first = chunks.begin(chunk);
    groups.for_each_piece(
        first, first + chunks.values(chunk),
        [&](uint64_t group, uint64_t begin, uint64_t n) { body(group, begin - first, n); });
  }
};

// A call of encode.
struct Encoding {
  const Input& input;
  const ChunkedShape& shape;
  const Measurement& measured;
  const DrawContext& draw;
  std::byte* heads;

  // Calls body(group, first value, its index in the chunk, number of values) for the pieces of a
  // chunk that lie in one group.
  template <typename Body>
  void for_each_piece(uint64_t chunk, const Body& body) const {
    const uint64_t begin = shape.chunks.begin(chunk);
    shape.for_each_piece(
        chunk, [&](uint64_t group, uint64_t at, uint64_t n) { body(group, begin + at, at, n); });
  }

  [[nodiscard]] const Kernels& kernels() const { return input.kernels(); }
  [[nodiscard]] std::byte* head(uint64_t group) const { return heads + shape.head_at(group); }
  // Only for heads that are one float.
  [[nodiscard]] float scale(uint64_t group) const { return load_le_f32(head(group)); }
};

// A call of decode, or a part of it.
struct Decoding {
  const ChunkedShape& shape;
  const std::byte* heads;
  DecodeMode mode;
  const Kernels& kernels;

  [[nodiscard]] bool stores() const { return mode == DecodeMode::kStore; }
  [[nodiscard]] const std::byte* head(uint64_t group) const { return heads + shape.head_at(group); }
  [[nodiscard]] float scale(uint64_t group) const { return load_le_f32(head(group)); }
};

using MeasurePart = std::function<Measurement(const Input& input, uint64_t begin, uint64_t n)>;

// Measures a segment chunk by chunk. Measurements are added in the order of the chunks, so that the
// result doesn't depend on the threads. Chunks are read from the last to the first: an encoder,
// which begins with the first, finds it in the cache.
Measurement measure_chunks(const Input& input, Execution& execution, const MeasurePart& measure);

// The largest magnitude alone.
Measurement measure_absmax(const Input& input, uint64_t begin, uint64_t n);

// A codec whose chunks several threads can work on. Where a segment is one group, its head is made
// from the segment's measurement; else encoding is one pass, which finds each group's head while
// the group's values are in the cache.
class ChunkedCodec : public Codec {
 public:
  // By default: where one group holds all values.
  bool measures_chunks(uint64_t n) const noexcept override { return shape(n).groups.count == 1; }
  uint64_t max_payload_size(uint64_t n) const noexcept override { return shape(n).max_size(); }
  // By default: from the shape's least size to its largest, or 0.
  Status check_size(uint64_t n, uint64_t size) const override;
  [[nodiscard]] virtual ChunkedShape shape(uint64_t n) const = 0;

 protected:
  using Codec::Codec;

  // The measurement that a group's head is made from, for the n values from `begin` on: by default
  // the largest magnitude.
  [[nodiscard]] virtual Measurement measure_group(const Input& input, uint64_t begin,
                                                  uint64_t n) const;
  // Writes the head of a group of n values.
  virtual void put_head(const Measurement& group, uint64_t n, const Encoding& encoding,
                        std::byte* head) const;
  // kCorruptPayload unless a decoder can work with these heads: by default, as check_scales.
  virtual Status check_heads(const ChunkedShape& shape, const std::byte* heads) const;

  // Codes a chunk, whose groups have their heads, into `slot`, which has room for it; returns the
  // size. The residual keeps the part of b that the decoder will not see.
  virtual uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const = 0;
  // Decodes a chunk; `out` is the place of its first value. false: the bytes are not valid for a
  // chunk of its length.
  virtual bool decode_chunk(const Decoding& decoding, uint64_t chunk,
                            std::span<const uint8_t> bytes, float* out) const = 0;

  Result<Measurement> measure_values(const Input& input, std::span<const Measurement> chunks,
                                     Execution& execution) const override;
  // By default: measure_group.
  Measurement measure_part(const Input& input, uint64_t begin, uint64_t n) const override {
    return measure_group(input, begin, n);
  }
  Result<uint64_t> encode_values(const Input& input, const Measurement& measured,
                                 const DrawContext& draw, std::span<std::byte> payload,
                                 Execution& execution, std::span<float> decoded) const override;
  Status decode_values(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                       Execution& execution, const AfterChunk& after) const override;

 private:
  Status undo(const Encoding& encoding, std::span<const std::byte> payload,
              Execution& execution) const;
};

// nullptr where the codec is no ChunkedCodec.
[[nodiscard]] GW_PRIVATE_EXPORT const ChunkedCodec* as_chunked(const Codec& codec);

// Adds the measurement of later values.
void add_to(Measurement& sum, const Measurement& more);

}  // namespace gradwire
