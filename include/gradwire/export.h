#pragma once

#if __cplusplus < 202002L
#error "gradwire's C++ headers need C++20"
#endif

// What the shared library shows of C++; all else in it is hidden.
#define GRADWIRE_EXPORT __attribute__((visibility("default")))
