#pragma once

// The scalar kernels of trit bits and of the rice coder; for src/stages alone.

#include <cstddef>
#include <cstdint>

namespace gradwire::scalar {

void trit_bits(const float* x, size_t n, float m, uint64_t* plus, uint64_t* minus);
void trit_bits_f32(const float* x, float* r, size_t n, float m, uint64_t* plus, uint64_t* minus);
void trit_bits_bf16(const float* x, uint16_t* r, size_t n, float m, uint64_t* plus,
                    uint64_t* minus);
size_t rice_encode(const uint64_t* plus, const uint64_t* minus, size_t n, uint8_t* out);
bool rice_decode(const uint8_t* bytes, size_t size, size_t n, uint64_t* plus, uint64_t* minus);
bool rice_unpack(const uint8_t* bytes, size_t size, size_t n, float m, float* out);
bool rice_unpack_add(const uint8_t* bytes, size_t size, size_t n, float m, float* out);

}  // namespace gradwire::scalar
