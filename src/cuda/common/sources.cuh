#pragma once

// Several payloads of each segment, added to the same values, as the owner of a shard does. If the
// values of a codec have fixed places, one pass over the bucket adds all payloads
// (fixed_decode.cuh); else the payloads are decoded onto the sum one after the other here, which
// moves 8 bytes for each value and payload.
//
// The first pass of encoding the result, which finds magnitudes, is not fused with it. That would
// save 4 of the 28 bytes that move for each value from the sum to the payload (sum read and
// written; sum and residual read; both read and the residual written), and only for codecs whose
// first pass is a maximum.

#include <cstdint>

#include "base/return_if_error.h"
#include "cuda/common/input.cuh"
#include "cuda/common/segments.h"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

GW_HOST_DEVICE inline bool divides(float divisor) { return divisor != 0.0f && divisor != 1.0f; }

static __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    divide_values(Segments segments, float* values, float divisor) {
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
#pragma unroll kUnrolled
  for (uint32_t at = threadIdx.x; at < chunk.n; at += kThreads) {
    values[chunk.begin + at] /= divisor;
  }
}

// decode_one(arguments) queues the decoding of one payload of each segment.
template <typename DecodeOne>
Status decode_one_by_one(const Segments& segments, const DecodeArguments& arguments,
                         cudaStream_t stream, const DecodeOne& decode_one) {
  DecodeArguments one = arguments;
  one.sources = 1;
  for (uint32_t source = 0; source < arguments.sources; ++source) {
    GW_RETURN_IF_ERROR(decode_one(one));
    one.places_dev += segments.count;
    one.decoded_dev += segments.count;
    one.mode = DecodeMode::kAdd;
  }
  if (!divides(arguments.divisor)) return {};
  return launch(divide_values, segments.chunks, stream, segments, arguments.out_dev,
                arguments.divisor);
}

}  // namespace gradwire::cuda
