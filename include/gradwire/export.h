#pragma once

#if __cplusplus < 202002L
#error "gradwire's C++ headers need C++20"
#endif

// Marks the C++ names that the shared library exports; all others are hidden.
#define GRADWIRE_EXPORT __attribute__((visibility("default")))
