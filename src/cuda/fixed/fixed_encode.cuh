#pragma once

// Encoding to payloads with one size: a head with the scales, and the values, each in the same
// number of bits (spec/format.md). Each block handles one chunk. A format says what is special
// about a codec:
//
//   struct Format {
//     static constexpr uint32_t kScaleBytes;     // of a scale in the head
//     static constexpr uint32_t kLeastInfinite;  // magnitude bits that are refused from here on
//     struct Scale;
//     // On the host: takes its scratch, and queues the kernels of the first pass, which clear
//     // `encoded`.
//     void take_scratch(const Segments& segments, ScratchLayout& layout);
//     Status prepare(const Segments& segments, const Input& input, EncodedSegment* encoded,
//                    cudaStream_t stream) const;
//     static uint64_t bytes(uint64_t n);  // of n values, a multiple of 8 but for the last
//     // What the first pass has found for a segment.
//     __device__ bool refused(uint32_t index) const;
//     __device__ bool sent(uint32_t index) const;  // false: the payload is empty
//     __device__ Scale scale(uint64_t of_call) const;
//     __device__ static void store(Scale scale, uint8_t* at);
//     // Writes value `at` (if `there`) and returns its residual. All lanes of a warp call it
//     // together.
//     __device__ static float put(uint8_t* values, uint32_t at, bool there, float b, Scale scale);
//   };
//
// and what fixed_decode.cuh asks for.

#include <cstdint>

#include "cuda/common/input.cuh"
#include "cuda/common/magnitudes.cuh"
#include "cuda/common/segments.h"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

template <typename Format>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    encode_fixed(Segments segments, Input input, Format format, uint8_t* payloads,
                 EncodedSegment* encoded) {
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const Segment& segment = chunk.segment;
  if (format.refused(chunk.index)) {
    return name_non_finite(chunk, input, Format::kLeastInfinite, encoded);
  }
  const uint64_t head = uint64_t{segment.scales} * Format::kScaleBytes;
  const bool sent = format.sent(chunk.index);
  if (sent && chunk.of_segment == 0 && threadIdx.x == 0) {
    encoded[chunk.index].size = head + Format::bytes(segment.n);
  }
  // Where nothing is sent, the residual still becomes b.
  if (!sent && !input.keeps_residual()) return;
  uint8_t* payload = payloads + segment.payload;
  uint8_t* values = payload + head + Format::bytes(chunk.first);
  const ScaleOf scale_of(chunk);
  auto scale = format.scale(segment.first_scale);
  input.replace(
      chunk.begin, chunk.n, [](uint32_t) {},
      [&](uint32_t, uint32_t at, float b) {
        if (segment.scales > 1 && at < chunk.n) {
          scale = format.scale(segment.first_scale + scale_of(at));
        }
        return Format::put(values, at, at < chunk.n, b, scale);
      });
  if constexpr (Format::kScaleBytes > 0) {
    const uint64_t end = chunk.end_scale();
    for (uint64_t i = chunk.first_scale() + threadIdx.x; i < end; i += kThreads) {
      Format::store(format.scale(segment.first_scale + i), payload + i * Format::kScaleBytes);
    }
  }
}

}  // namespace gradwire::cuda
