#pragma once

// The way back of fixed_encode.cuh. Any bytes are safe.

#include <cstdint>

#include "base/return_if_error.h"
#include "cuda/block.cuh"
#include "cuda/input.cuh"
#include "cuda/segments.h"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

// Sizes and heads; a block a segment.
template <typename Format>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    check_fixed(Segments segments, const uint8_t* payloads, const PayloadPlace* places,
                DecodedSegment* decoded) {
  __shared__ BlockShared shared;
  const Segment segment = segments.segments[blockIdx.x];
  const PayloadPlace place = places[blockIdx.x];
  const bool empty = place.size == 0;
  const uint64_t size = uint64_t{segment.scales} * Format::kScaleBytes + Format::bytes(segment.n);
  bool valid = place.size == size || (Format::kEmptyIsZero && empty);
  if constexpr (Format::kScaleBytes > 0) {
    uint32_t wrong = 0;
    uint32_t not_zero = 0;
    for (uint64_t i = threadIdx.x; valid && !empty && i < segment.scales; i += kThreads) {
      bool any = false;
      if (!Format::valid(payloads + place.begin + i * Format::kScaleBytes, any)) wrong = 1;
      if (any) not_zero = 1;
    }
    wrong = block_max(wrong, shared);
    not_zero = block_max(not_zero, shared);
    valid = valid && wrong == 0 && (empty || not_zero != 0);
  }
  if (threadIdx.x == 0) decoded[blockIdx.x] = {valid ? 1u : 0u, empty ? 1u : 0u};
}

// Stores or adds what value_at(at) gives for the values of a chunk. Several loads are under way
// before anything is stored.
template <typename ValueAt>
__device__ void put_values(const Chunk& chunk, float* out, DecodeMode mode,
                           const ValueAt& value_at) {
  float* to = out + chunk.begin;
  for (uint32_t base = threadIdx.x; base < chunk.n; base += kUnrolled * kThreads) {
    float values[kUnrolled] = {};
    if (mode == DecodeMode::kAdd) {
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) {
        const uint32_t at = base + i * kThreads;
        if (at < chunk.n) values[i] = to[at];
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      const uint32_t at = base + i * kThreads;
      if (at >= chunk.n) continue;
      const float value = value_at(at);
      values[i] = mode == DecodeMode::kAdd ? values[i] + value : value;
    }
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      const uint32_t at = base + i * kThreads;
      if (at < chunk.n) to[at] = values[i];
    }
  }
}

// A chunk's values. A wrong one marks the segment; no thread waits for another here.
template <typename Format>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    decode_fixed(Segments segments, const uint8_t* payloads, const PayloadPlace* places, float* out,
                 DecodeMode mode, DecodedSegment* decoded) {
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const PayloadPlace place = places[chunk.index];
  if (decoded[chunk.index].valid == 0) return;
  if (place.size == 0) {
    if (mode == DecodeMode::kStore) put_values(chunk, out, mode, [](uint32_t) { return 0.0f; });
    return;
  }
  const uint8_t* payload = payloads + place.begin;
  const uint8_t* values =
      payload + uint64_t{chunk.segment.scales} * Format::kScaleBytes + Format::bytes(chunk.first);
  const ScaleOf scale_of(chunk);
  auto scale = Format::load(payload);
  bool valid = true;
  put_values(chunk, out, mode, [&](uint32_t at) {
    if (chunk.segment.scales > 1) {
      scale = Format::load(payload + scale_of(at) * Format::kScaleBytes);
    }
    valid = valid && Format::valid_at(values, at, chunk.n);
    return Format::get(values, at, scale);
  });
  if (!valid) decoded[chunk.index].valid = 0;
}

// Queues both.
template <typename Format>
Status decode_fixed_payloads(const Segments& segments, const DecodeArguments& arguments,
                             cudaStream_t stream) {
  const auto* payloads = reinterpret_cast<const uint8_t*>(arguments.payloads_dev);
  GW_RETURN_IF_ERROR(launch(check_fixed<Format>, segments.count, stream, segments, payloads,
                            arguments.places_dev, arguments.decoded_dev));
  return launch(decode_fixed<Format>, segments.chunks, stream, segments, payloads,
                arguments.places_dev, arguments.out_dev, arguments.mode, arguments.decoded_dev);
}

}  // namespace gradwire::cuda
