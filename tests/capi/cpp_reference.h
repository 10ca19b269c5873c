/* The results of the C++ API for the same arguments, with which the tests in C compare. */
#ifndef TESTS_CAPI_CPP_REFERENCE_H_
#define TESTS_CAPI_CPP_REFERENCE_H_

#include <stddef.h>
#include <stdint.h>

#include "gradwire/gradwire.h"

#ifdef __cplusplus
extern "C" {
#endif

/* These return the size of the frame, or 0 on failure. */
uint64_t cpp_encode(const char* codec, const void* x, uint64_t n, gw_dtype dtype, gw_draw draw,
                    void* frame, uint64_t capacity);
/* The frame of the last of `steps` steps of a compressor, with the same x in each. */
uint64_t cpp_compress(const char* codec, const void* x, uint64_t n, gw_dtype dtype, uint64_t seed,
                      uint64_t stream, uint64_t steps, void* frame, uint64_t capacity);
/* Returns 0 on failure. */
int cpp_decode(const void* frame, uint64_t size, float* out, uint64_t n, int add);
/* One step of all ranks. buckets holds world * n floats, for each rank a tensor "weight" [n / 4,
   4]. Returns 0 on failure. */
int cpp_average(const char* kind, const char* codec, uint32_t world, float* buckets, uint64_t n,
                uint64_t step);

#ifdef __cplusplus
}
#endif

#endif /* TESTS_CAPI_CPP_REFERENCE_H_ */
