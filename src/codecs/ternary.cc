#include "codecs/ternary.h"

#include <algorithm>
#include <string>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "stages/element.h"

namespace gradwire {
namespace {

Status corrupt(std::string_view name, const std::string& what) {
  return {StatusCode::kCorruptPayload, std::string(name) + ": " + what};
}

// Each scale finite, its sign bit clear, and at least one above zero.
Status check_scales(const TernaryShape& shape, std::string_view name, const std::byte* scales) {
  bool any = false;
  for (uint64_t i = 0; i < shape.buckets.count; ++i) {
    const uint32_t bits = load_le<uint32_t>(scales + i * sizeof(float));
    if (bits >= kNonFiniteBits) {
      return corrupt(name, "scale " + std::to_string(i) + " is negative, infinite or NaN");
    }
    any |= bits != 0;
  }
  return any ? Status() : corrupt(name, "all scales are 0, which has an empty payload");
}

// Fewest bytes that chunk `chunk` can take.
uint64_t fewest_bytes(const TernaryShape& shape, uint64_t chunk) {
  const uint64_t packed = packed_size(shape.chunks.values(chunk));
  switch (shape.coder) {
    case TernaryCoder::kNone:
      return packed;
    case TernaryCoder::kZeroRun:
      return (packed + kLongestRun - 1) / kLongestRun;
  }
  return packed;
}

bool decode_chunk(const TernaryShape& shape, uint64_t chunk, std::span<const uint8_t> bytes,
                  const std::byte* scales, std::span<float> out, DecodeMode mode,
                  const Kernels& kernels) {
  const uint64_t first = shape.chunks.begin(chunk);
  const uint64_t n = shape.chunks.values(chunk);
  if (shape.coder == TernaryCoder::kZeroRun && shape.buckets.count == 1) {
    const auto decode =
        mode == DecodeMode::kStore ? kernels.zero_run_unpack : kernels.zero_run_unpack_add;
    return decode(bytes.data(), bytes.size(), n, load_le_f32(scales), out.data() + first);
  }
  alignas(64) uint8_t buffer[kChunkValues / kTritsPerByte];
  const uint8_t* packed = bytes.data();
  if (shape.coder == TernaryCoder::kZeroRun) {
    if (!kernels.zero_run_decode(bytes.data(), bytes.size(), buffer, packed_size(n))) return false;
    packed = buffer;
  }
  const auto unpack = mode == DecodeMode::kStore ? kernels.unpack : kernels.unpack_add;
  bool valid = true;
  shape.buckets.for_each_piece(
      first, first + n, [&](uint64_t bucket, uint64_t begin, uint64_t count) {
        valid = valid && unpack(packed + (begin - first) / kTritsPerByte, count,
                                load_le_f32(scales + bucket * sizeof(float)), out.data() + begin);
      });
  return valid;
}

}  // namespace

TernaryShape::TernaryShape(uint64_t n, TernaryCoder ternary_coder, uint64_t bucket)
    : coder(ternary_coder),
      buckets(n, bucket),
      chunks(n, buckets.count * sizeof(float),
             coder == TernaryCoder::kNone ? ChunkShape::Sizes::kFixed : ChunkShape::Sizes::kVarying,
             packed_size) {}

Status check_ternary_size(const TernaryShape& shape, std::string_view name, uint64_t size) {
  if (size == 0) return {};  // all +0
  const ChunkShape& chunks = shape.chunks;
  if (chunks.n > 0) {
    const uint64_t fewest = chunks.chunks_offset() + (chunks.chunks - 1) * fewest_bytes(shape, 0) +
                            fewest_bytes(shape, chunks.chunks - 1);
    if (size >= fewest && size <= shape.max_size()) return {};
  }
  return corrupt(name, std::to_string(chunks.n) + " values don't fit a payload of " +
                           std::to_string(size) + " bytes");
}

Status decode_ternary(const TernaryShape& shape, std::string_view name,
                      std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                      Execution& execution) {
  GW_RETURN_IF_ERROR(check_ternary_size(shape, name, payload.size()));
  if (payload.empty()) {
    if (mode == DecodeMode::kStore) std::fill(out.begin(), out.end(), 0.0f);
    return {};
  }
  GW_RETURN_IF_ERROR(check_scales(shape, name, payload.data()));
  return decode_chunks(
      shape.chunks, payload, name, execution, [&](uint64_t chunk, std::span<const uint8_t> bytes) {
        return decode_chunk(shape, chunk, bytes, payload.data(), out, mode, execution.kernels());
      });
}

}  // namespace gradwire
