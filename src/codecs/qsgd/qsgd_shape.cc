#include "codecs/qsgd/qsgd_shape.h"

#include "stages/elias/elias.h"

namespace gradwire {
namespace {

// Bytes that n coded levels take.
ChunkSize coded_size(LevelCoder coder, int32_t s, uint64_t n) {
  switch (coder) {
    case LevelCoder::kFixed:
      return packed_levels_size(n, level_width(s));
    case LevelCoder::kSparse:
      return {sparse_levels_least(n), sparse_levels_room(n, s)};
    case LevelCoder::kDense:
      return {dense_levels_least(n), dense_levels_room(n, s)};
  }
  return 0;
}

}  // namespace

QsgdShape::QsgdShape(uint64_t n, int32_t s, LevelCoder level_coder, uint64_t group_size)
    : ChunkedShape(Groups(n, group_size), sizeof(float),
                   [=](uint64_t values) { return coded_size(level_coder, s, values); }),
      levels(s),
      coder(level_coder) {}

uint64_t write_levels(LevelCoder coder, int32_t s, const int8_t* levels, uint64_t n, uint8_t* slot,
                      const Kernels& kernels) {
  switch (coder) {
    case LevelCoder::kFixed:
      kernels.pack_levels(levels, n, s, slot);
      return packed_levels_size(n, level_width(s));
    case LevelCoder::kSparse:
      return kernels.encode_sparse_levels(levels, n, slot);
    case LevelCoder::kDense:
      return kernels.encode_dense_levels(levels, n, slot);
  }
  return 0;
}

bool read_levels(LevelCoder coder, int32_t s, std::span<const uint8_t> bytes, uint64_t n,
                 int8_t* levels, const Kernels& kernels) {
  switch (coder) {
    case LevelCoder::kFixed:
      return kernels.unpack_levels(bytes.data(), n, s, levels);
    case LevelCoder::kSparse:
      return kernels.decode_sparse_levels(bytes.data(), bytes.size(), n, s, levels);
    case LevelCoder::kDense:
      return kernels.decode_dense_levels(bytes.data(), bytes.size(), n, s, levels);
  }
  return false;
}

}  // namespace gradwire
