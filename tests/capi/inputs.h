/* Inputs for the tests in C. */
#ifndef TESTS_CAPI_INPUTS_H_
#define TESTS_CAPI_INPUTS_H_

#include <stdint.h>
#include <string.h>

/* Values like gradients: most are near 0, some are far from it. A seed always gives the same
   values. */
static inline void fill_gradient(float* x, uint64_t n, uint64_t seed) {
  uint64_t state = seed * 2 + 1;
  for (uint64_t i = 0; i < n; ++i) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    const float u = (float)(int32_t)(state >> 32) * (1.0f / 2147483648.0f);
    x[i] = 0.01f * u * u * u;
  }
}

/* The upper half of a float: bfloat16, rounded towards 0. */
static inline uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (uint16_t)(bits >> 16);
}

/* IEEE binary16 for magnitudes in [2^-14, 2^15], rounded towards 0; 0 below. */
static inline uint16_t to_f16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const uint32_t exponent = (bits >> 23) & 255;
  if (exponent < 113) return (uint16_t)(bits >> 16 & 0x8000);
  return (uint16_t)((bits >> 16 & 0x8000) | (exponent - 112) << 10 | (bits >> 13 & 0x3ff));
}

#endif /* TESTS_CAPI_INPUTS_H_ */
