#pragma once

#include <cstdint>

#include "gradwire/status.h"

namespace gradwire::mpi {

// Whether a GPU owns this memory, which the host can't read. False where the process has not loaded
// CUDA's driver, which is looked up at run time: the library needs no CUDA. Managed memory is the
// host's, too.
bool is_on_device(const void* memory);

// Copies between the host and memory of a GPU, and waits for it. kDeviceError.
Status copy_from_device(const void* device, uint64_t size, void* host);
Status copy_to_device(const void* host, uint64_t size, void* device);

}  // namespace gradwire::mpi
