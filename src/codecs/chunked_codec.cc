#include "codecs/chunked_codec.h"

#include <atomic>
#include <cmath>
#include <vector>

#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "stages/element/float_bits.h"

namespace gradwire {
namespace {

bool is_finite(const Measurement& found) {
  return found.largest < kNonFiniteBits && std::isfinite(found.sums[0]) &&
         std::isfinite(found.sums[1]);
}

Measurement sum_up(std::span<const Measurement> parts) {
  Measurement whole{.complete = true};
  for (const Measurement& part : parts) add_to(whole, part);
  return whole;
}

// Marks the head of a group that is not finite, until encode fails: no valid scale is infinite.
void refuse_group(std::byte* head) { store_le(head, kNonFiniteBits); }
bool is_refused(const std::byte* head) { return load_le<uint32_t>(head) == kNonFiniteBits; }

bool holds_refused_group(const Encoding& encoding, uint64_t chunk) {
  bool any = false;
  encoding.shape.for_each_piece(
      chunk, [&](uint64_t group, uint64_t, uint64_t) { any |= is_refused(encoding.head(group)); });
  return any;
}

}  // namespace

void add_to(Measurement& sum, const Measurement& more) {
  sum.largest = std::max(sum.largest, more.largest);
  sum.count += more.count;
  for (int i = 0; i < 2; ++i) sum.sums[i] += more.sums[i];
}

const ChunkedCodec* as_chunked(const Codec& codec) {
  return dynamic_cast<const ChunkedCodec*>(&codec);
}

Status ChunkedCodec::check_size(uint64_t n, uint64_t size) const {
  const ChunkShape chunks = shape(n).chunks;
  return check_chunks_size(info().name, chunks, chunks.least_size, size);
}

Measurement measure_absmax(const Input& input, uint64_t begin, uint64_t n) {
  return {.largest = input.absmax(begin, n)};
}

Measurement measure_chunks(const Input& input, Execution& execution, const MeasurePart& measure) {
  std::vector<Measurement> found((input.size() + kChunkValues - 1) / kChunkValues);
  execution.for_each(found.size(), [&](size_t i) {
    const uint64_t chunk = found.size() - 1 - i;
    const uint64_t begin = chunk * kChunkValues;
    found[chunk] = measure(input, begin, std::min(kChunkValues, input.size() - begin));
  });
  return sum_up(found);
}

Measurement ChunkedCodec::measure_group(const Input& input, uint64_t begin, uint64_t n) const {
  return measure_absmax(input, begin, n);
}

void ChunkedCodec::put_head(const Measurement&, uint64_t, const Encoding&, std::byte*) const {}

Status ChunkedCodec::check_heads(const ChunkedShape& shape, const std::byte* heads) const {
  if (shape.heads_size() == 0) return {};
  return check_scales(info().name, heads, shape.groups.count);
}

Result<Measurement> ChunkedCodec::measure_values(const Input& input,
                                                 std::span<const Measurement> chunks,
                                                 Execution& execution) const {
  if (!measures_chunks(input.size())) return Measurement();
  const Measurement whole =
      !chunks.empty()
          ? sum_up(chunks)
          : measure_chunks(input, execution, [this](const Input& x, uint64_t begin, uint64_t n) {
              return measure_part(x, begin, n);
            });
  const bool refused = whole.largest >= refused_magnitude(input.residual().type());
  if (refused || !is_finite(whole)) return refuse(input);
  return whole;
}

Result<uint64_t> ChunkedCodec::encode_values(const Input& input, const Measurement& measured,
                                             const DrawContext& draw, std::span<std::byte> payload,
                                             Execution& execution, std::span<float> decoded) const {
  const ChunkedShape shape = this->shape(input.size());
  const Groups& groups = shape.groups;
  const Encoding encoding{input, shape, measured, draw, payload.data()};
  const Decoding decoding{shape, payload.data(), DecodeMode::kStore, execution.kernels()};
  const bool has_heads = shape.heads_size() > 0;
  const bool is_measured = !has_heads || (measured.complete && groups.count == 1);
  if (has_heads && is_measured) {
    put_head(measured, input.size(), encoding, payload.data());
    const bool is_zero = all_zero(payload.data(), shape.heads_size() / sizeof(float));
    // With a residual, encoding goes on, because it must update the residual.
    if (is_zero && !input.keeps_residual()) return 0;
    if (!is_zero && !check_heads(shape, payload.data()).ok()) return changed_meanwhile(info());
  }
  std::atomic<bool> refused{false};
  const auto find_head = [&](uint64_t group) {
    const Measurement found = measure_group(input, groups.begin(group), groups.values(group));
    if (is_finite(found))
      return put_head(found, groups.values(group), encoding, encoding.head(group));
    refuse_group(encoding.head(group));
    refused = true;
  };
  // A group that several chunks share is measured before any thread changes its residual.
  const bool in_order = execution.goes_in_order(shape.chunks.chunks);
  if (!is_measured && !in_order) {
    execution.for_each(shape.chunks.chunks - 1, [&](size_t chunk) {
      const uint64_t end = shape.chunks.begin(chunk + 1);
      const uint64_t begin = groups.begin(end / groups.size);
      if (begin < end && begin >= shape.chunks.begin(chunk)) find_head(end / groups.size);
    });
  }
  const uint64_t size =
      encode_chunks(shape.chunks, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
        if (is_measured) {
          const uint64_t coded = encode_chunk(encoding, chunk, slot);
          if (!decoded.empty()) {
            decode_chunk(decoding, chunk, {slot, coded},
                         decoded.data() + shape.chunks.begin(chunk));
          }
          return coded;
        }
        shape.for_each_piece(chunk, [&](uint64_t group, uint64_t first, uint64_t n) {
          const uint64_t begin = shape.chunks.begin(chunk) + first;
          if (begin == groups.begin(group) && (in_order || n == groups.values(group))) {
            find_head(group);
          }
        });
        if (!refused || !holds_refused_group(encoding, chunk)) {
          return encode_chunk(encoding, chunk, slot);
        }
        return shape.chunks.varying ? 0 : shape.chunks.room(chunk);
      });
  if (refused) return undo(encoding, payload.first(size), execution);
  if (has_heads && all_zero(payload.data(), shape.heads_size() / sizeof(float))) return 0;
  if (!is_measured && !decoded.empty()) {
    GW_RETURN_IF_ERROR(
        decode_values(payload.first(size), decoded, DecodeMode::kStore, execution, {}));
  }
  return size;
}

// Restores the residual of the chunks that were encoded, and says which value was refused.
Status ChunkedCodec::undo(const Encoding& encoding, std::span<const std::byte> payload,
                          Execution& execution) const {
  const Decoding decoding{encoding.shape, encoding.heads, DecodeMode::kStore, encoding.kernels()};
  if (encoding.input.keeps_residual()) {
    GW_RETURN_IF_ERROR(
        decode_chunks(encoding.shape.chunks, payload, info().name, execution,
                      [&](uint64_t chunk, std::span<const uint8_t> bytes) {
                        if (holds_refused_group(encoding, chunk)) return true;
                        float decoded[kChunkValues];
                        const bool valid = decode_chunk(decoding, chunk, bytes, decoded);
                        const uint64_t begin = encoding.shape.chunks.begin(chunk);
                        encoding.input.restore(begin, encoding.shape.chunks.values(chunk), decoded);
                        return valid;
                      }));
  }
  return refuse(encoding.input);
}

Status ChunkedCodec::decode_values(std::span<const std::byte> payload, std::span<float> out,
                                   DecodeMode mode, Execution& execution,
                                   const AfterChunk& after) const {
  const ChunkedShape shape = this->shape(out.size());
  GW_RETURN_IF_ERROR(check_heads(shape, payload.data()));
  const Decoding decoding{shape, payload.data(), mode, execution.kernels()};
  return decode_chunks(shape.chunks, payload, info().name, execution,
                       [&](uint64_t chunk, std::span<const uint8_t> bytes) {
                         const uint64_t begin = shape.chunks.begin(chunk);
                         if (!decode_chunk(decoding, chunk, bytes, out.data() + begin))
                           return false;
                         if (after) after(begin, shape.chunks.values(chunk));
                         return true;
                       });
}

}  // namespace gradwire
