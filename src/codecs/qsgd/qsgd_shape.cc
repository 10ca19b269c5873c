#include "codecs/qsgd/qsgd_shape.h"

#include <algorithm>

#include "stages/elias/elias.h"
#include "stages/elias/elias_scalar.h"
#include "stages/levels/levels_scalar.h"

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

// Elias codes of levels do not depend on s. So chunks whose levels all fit an int8, as nearly all
// do with norm l2, are coded by the kernels for these, which are faster. false: a level does not
// fit.
bool narrow(const int16_t* levels, uint64_t n, int8_t* bytes) {
  bool fits = true;
  for (uint64_t i = 0; i < n; ++i) {
    fits &= levels[i] >= -kLargestByteLevel && levels[i] <= kLargestByteLevel;
    bytes[i] = static_cast<int8_t>(levels[i]);
  }
  return fits;
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

uint64_t write_levels(LevelCoder coder, int32_t s, const int16_t* levels, uint64_t n, uint8_t* slot,
                      const Kernels& kernels) {
  alignas(64) int8_t bytes[kChunkValues];
  if (coder != LevelCoder::kFixed && narrow(levels, n, bytes)) {
    return write_levels(coder, s, bytes, n, slot, kernels);
  }
  switch (coder) {
    case LevelCoder::kFixed:
      scalar::pack_levels(levels, n, s, slot);
      return packed_levels_size(n, level_width(s));
    case LevelCoder::kSparse:
      return scalar::encode_sparse_levels(levels, n, slot);
    case LevelCoder::kDense:
      return scalar::encode_dense_levels(levels, n, slot);
  }
  return 0;
}

bool read_levels(LevelCoder coder, int32_t s, std::span<const uint8_t> bytes, uint64_t n,
                 int16_t* levels, const Kernels& kernels) {
  alignas(64) int8_t narrow_levels[kChunkValues];
  if (coder != LevelCoder::kFixed &&
      read_levels(coder, kLargestByteLevel, bytes, n, narrow_levels, kernels)) {
    std::copy_n(narrow_levels, n, levels);
    return true;
  }
  switch (coder) {
    case LevelCoder::kFixed:
      return scalar::unpack_levels(bytes.data(), n, s, levels);
    case LevelCoder::kSparse:
      return scalar::decode_sparse_levels(bytes.data(), bytes.size(), n, s, levels);
    case LevelCoder::kDense:
      return scalar::decode_dense_levels(bytes.data(), bytes.size(), n, s, levels);
  }
  return false;
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
