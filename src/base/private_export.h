#pragma once

// What a shared libgradwire.so shows to libgradwire_cuda.so of the same build, and to nothing else:
// its symbol version is GRADWIRE_PRIVATE (cmake/gradwire.map.in).
#define GW_PRIVATE_EXPORT __attribute__((visibility("default")))
