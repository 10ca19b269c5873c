#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "exchange/shards/shard_codec.h"

namespace gradwire::cuda {

// Where residuals lie.
enum class ResidualMemory : uint8_t {
  kDevice,
  // Page-locked memory of the host, which kernels read and write over the bus while they encode
  // (3LC, section 3.1): no memory of the device. Encoding reads and writes a residual as often as
  // in the device's memory.
  kHost,
};

// Makes shard codecs for buckets in the memory of a device: the span of floats that an exchange is
// given then holds device addresses. Packets and messages lie in the memory of the host, with the
// same bytes as those of shard codecs of the host. Work is queued on `stream`, and each call waits
// for it. Every codec of the layout must have kernels (kUnknownCodec).
[[nodiscard]] ShardCodecFactory device_shard_codecs(
    int device, cudaStream_t stream, ResidualMemory residuals = ResidualMemory::kDevice);

}  // namespace gradwire::cuda
