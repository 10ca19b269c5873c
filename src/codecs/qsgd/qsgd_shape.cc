#include "codecs/qsgd/qsgd_shape.h"

#include <cfloat>
#include <string>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "stages/elias.h"

namespace gradwire {
namespace {

// Most bytes that n coded levels take.
uint64_t room(LevelCoder coder, int32_t s, uint64_t n) {
  switch (coder) {
    case LevelCoder::kFixed:
      return packed_levels_size(n, level_width(s));
    case LevelCoder::kSparse:
      return sparse_levels_room(n, s);
    case LevelCoder::kDense:
      return dense_levels_room(n, s);
  }
  return 0;
}

// Fewest bytes.
uint64_t least(LevelCoder coder, int32_t s, uint64_t n) {
  switch (coder) {
    case LevelCoder::kFixed:
      return packed_levels_size(n, level_width(s));
    case LevelCoder::kSparse:
      return sparse_levels_least(n);
    case LevelCoder::kDense:
      return dense_levels_least(n);
  }
  return 0;
}

// Each unit finite with its sign bit clear, so is s times it, and at least one is above zero.
Status check_units(const QsgdShape& shape, std::string_view name, const std::byte* units) {
  bool any = false;
  for (uint64_t i = 0; i < shape.buckets.count; ++i) {
    const uint32_t bits = load_le<uint32_t>(units + i * sizeof(float));
    if (bits >= kNonFiniteBits || float_of(bits) * static_cast<float>(shape.levels) > FLT_MAX) {
      return corrupt_payload(name, "unit " + std::to_string(i) + " is negative, too large or NaN");
    }
    any |= bits != 0;
  }
  return any ? Status() : corrupt_payload(name, "all units are 0, which has an empty payload");
}

bool read_levels(const QsgdShape& shape, std::span<const uint8_t> bytes, uint64_t n, int8_t* levels,
                 const Kernels& kernels) {
  switch (shape.coder) {
    case LevelCoder::kFixed:
      return kernels.unpack_levels(bytes.data(), n, shape.levels, levels);
    case LevelCoder::kSparse:
      return kernels.decode_sparse_levels(bytes.data(), bytes.size(), n, shape.levels, levels);
    case LevelCoder::kDense:
      return kernels.decode_dense_levels(bytes.data(), bytes.size(), n, shape.levels, levels);
  }
  return false;
}

}  // namespace

QsgdShape::QsgdShape(uint64_t n, int32_t s, LevelCoder level_coder, uint64_t bucket)
    : levels(s),
      coder(level_coder),
      buckets(n, bucket),
      chunks(n, buckets.count * sizeof(float),
             coder == LevelCoder::kFixed ? ChunkShape::Sizes::kFixed : ChunkShape::Sizes::kVarying,
             [=](uint64_t values) { return room(level_coder, s, values); }) {}

uint64_t write_levels(const QsgdShape& shape, uint64_t chunk, const int8_t* levels, uint8_t* slot,
                      const Kernels& kernels) {
  const uint64_t n = shape.chunks.values(chunk);
  switch (shape.coder) {
    case LevelCoder::kFixed:
      kernels.pack_levels(levels, n, shape.levels, slot);
      return shape.chunks.room(chunk);
    case LevelCoder::kSparse:
      return kernels.encode_sparse_levels(levels, n, slot);
    case LevelCoder::kDense:
      return kernels.encode_dense_levels(levels, n, slot);
  }
  return 0;
}

Status check_qsgd_size(const QsgdShape& shape, std::string_view name, uint64_t size) {
  const uint64_t fewest =
      shape.chunks.size_with([&](uint64_t n) { return least(shape.coder, shape.levels, n); });
  return check_chunks_size(name, shape.chunks, fewest, size);
}

Status decode_qsgd(const QsgdShape& shape, std::string_view name,
                   std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                   Execution& execution) {
  GW_RETURN_IF_ERROR(check_qsgd_size(shape, name, payload.size()));
  if (payload.empty()) return decode_zeros(out, mode);
  const std::byte* units = payload.data();
  GW_RETURN_IF_ERROR(check_units(shape, name, units));
  const Kernels& kernels = execution.kernels();
  const auto scale = mode == DecodeMode::kStore ? kernels.scale_levels : kernels.scale_add_levels;
  return decode_chunks(
      shape.chunks, payload, name, execution, [&](uint64_t chunk, std::span<const uint8_t> bytes) {
        alignas(64) int8_t levels[kChunkValues];
        const uint64_t first = shape.chunks.begin(chunk);
        const uint64_t n = shape.chunks.values(chunk);
        if (!read_levels(shape, bytes, n, levels, kernels)) return false;
        shape.buckets.for_each_piece(
            first, first + n, [&](uint64_t bucket, uint64_t begin, uint64_t count) {
              scale(levels + (begin - first), count, load_le_f32(units + bucket * sizeof(float)),
                    out.data() + begin);
            });
        return true;
      });
}

}  // namespace gradwire
