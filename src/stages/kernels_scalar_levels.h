#pragma once

// The scalar kernels of levels. Contracts: stages/kernels.h.

#include <cstddef>
#include <cstdint>

#include "stages/levels.h"

namespace gradwire::scalar {

void quantize_levels(const float* x, size_t n, LevelScale scale, const uint32_t* words,
                     int8_t* levels);
void scale_levels(const int8_t* levels, size_t n, float unit, float* out);
void scale_add_levels(const int8_t* levels, size_t n, float unit, float* out);
void pack_levels(const int8_t* levels, size_t n, int32_t s, uint8_t* packed);
bool unpack_levels(const uint8_t* packed, size_t n, int32_t s, int8_t* levels);
size_t encode_sparse_levels(const int8_t* levels, size_t n, uint8_t* out);
size_t encode_dense_levels(const int8_t* levels, size_t n, uint8_t* out);
bool decode_sparse_levels(const uint8_t* coded, size_t size, size_t n, int32_t s, int8_t* levels);
bool decode_dense_levels(const uint8_t* coded, size_t size, size_t n, int32_t s, int8_t* levels);

}  // namespace gradwire::scalar
