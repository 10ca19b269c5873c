#pragma once

#include <cuda_runtime_api.h>

#include "exchange/shards/shard_codec.h"

namespace gradwire::cuda {

// Makes shard codecs for buckets in the memory of a device: the span of floats that an exchange is
// given then holds device addresses. Packets and messages lie in the memory of the host, with the
// same bytes as those of shard codecs of the host. Work is queued on `stream`, and each call waits
// for it. Every codec of the layout must have kernels (kUnknownCodec).
[[nodiscard]] ShardCodecFactory device_shard_codecs(int device, cudaStream_t stream);

}  // namespace gradwire::cuda
