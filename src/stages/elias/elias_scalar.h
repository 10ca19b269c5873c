#pragma once

// The scalar kernels of Elias coding. Contracts: stages/kernels.def. Level: int8_t, or int16_t for
// wide levels, which are coded with these loops on every target.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "stages/elias/elias.h"
#include "stages/elias/elias_bits.h"

namespace gradwire::scalar {

template <typename Level>
size_t encode_sparse_levels(const Level* levels, size_t n, uint8_t* out) {
  EliasWriter writer(out);
  uint32_t distance = 0;
  for (size_t i = 0; i < n; ++i) {
    ++distance;
    if (levels[i] == 0) continue;
    writer.put(elias_code(distance));
    writer.put(sparse_level_code(levels[i]));
    distance = 0;
  }
  writer.put(elias_code(distance + 1));
  return writer.finish();
}

template <typename Level>
size_t encode_dense_levels(const Level* levels, size_t n, uint8_t* out) {
  EliasWriter writer(out);
  for (size_t i = 0; i < n; ++i) writer.put(dense_level_code(levels[i]));
  return writer.finish();
}

template <typename Level>
bool decode_sparse_levels(const uint8_t* coded, size_t size, size_t n, int32_t s, Level* levels) {
  std::fill(levels, levels + n, Level{0});
  EliasReader reader(coded, size);
  for (size_t i = 0;;) {
    const EliasNumber distance = elias_read(reader.window());
    if (distance.length == 0 || distance.value > n + 1 - i) return false;
    i += distance.value;
    reader.skip(distance.length);
    if (i > n) return reader.at_end();
    const EliasLevel level = sparse_level_read(reader.window());
    if (level.length == 0 || std::abs(level.level) > s) return false;
    levels[i - 1] = static_cast<Level>(level.level);
    reader.skip(level.length);
  }
}

template <typename Level>
bool decode_dense_levels(const uint8_t* coded, size_t size, size_t n, int32_t s, Level* levels) {
  EliasReader reader(coded, size);
  for (size_t i = 0; i < n; ++i) {
    const EliasLevel level = dense_level_read(reader.window());
    if (level.length == 0 || std::abs(level.level) > s) return false;
    levels[i] = static_cast<Level>(level.level);
    reader.skip(level.length);
  }
  return reader.at_end();
}

}  // namespace gradwire::scalar
