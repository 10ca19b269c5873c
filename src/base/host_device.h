#pragma once

// Marks the functions that CUDA kernels call too.
#if defined(__CUDACC__)
#define GW_HOST_DEVICE __host__ __device__
#else
#define GW_HOST_DEVICE
#endif
