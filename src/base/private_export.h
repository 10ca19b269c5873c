#pragma once

// Marks the symbols that libgradwire.so exports only for the libgradwire_cuda.so of the same build.
// Their symbol version is GRADWIRE_PRIVATE (cmake/gradwire.map.in).
#define GW_PRIVATE_EXPORT __attribute__((visibility("default")))
