#pragma once

// The payloads that a call decodes, and the check of the scales in their heads. A format says what
// scales look like:
//
//   static constexpr uint32_t kScaleBytes;  // of one scale; 0: there are none
//   // Whether the scale at `scale` is a valid one; `any` becomes whether it is not 0.
//   __device__ bool valid(const uint8_t* scale, bool& any) const;

#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/common/segments.h"
#include "cuda/common/unaligned.cuh"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

// Payloads are numbered source by source: first those of all segments from the first source.
struct Payloads {
  const uint8_t* bytes;
  const PayloadPlace* places;
  uint32_t sources;
  DecodedSegment* decoded;
  uint32_t* any;  // for each payload: whether one of its scales is not 0

  Payloads(const DecodeArguments& arguments, uint32_t* any_scale)
      : bytes(reinterpret_cast<const uint8_t*>(arguments.payloads_dev)),
        places(arguments.places_dev),
        sources(arguments.sources),
        decoded(arguments.decoded_dev),
        any(any_scale) {}

  __device__ void refuse(uint64_t payload) const { atomicExch(&decoded[payload].valid, 0u); }
  // Whether there are bytes to decode, as far as is known.
  __device__ bool has_values(uint64_t payload) const {
    return decoded[payload].valid != 0 && decoded[payload].empty == 0;
  }
};

// Refuses payloads with an invalid scale, and finds those with a scale that is not 0. Each thread
// checks one scale. What `decoded` says of the sizes stands there already, and `any` is 0.
template <typename Format>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    check_scales(Segments segments, Format format, Payloads payloads) {
  const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread >= uint64_t{payloads.sources} * segments.scales) return;
  const auto scale = static_cast<uint32_t>(thread % segments.scales);
  const uint32_t index = segment_of_scale(segments, scale);
  const uint64_t payload = thread / segments.scales * segments.count + index;
  if (!payloads.has_values(payload)) return;
  const uint32_t of_segment = scale - segments.segments[index].first_scale;
  bool any = false;
  if (!format.valid(payloads.bytes + payloads.places[payload].begin +
                        uint64_t{of_segment} * Format::kScaleBytes,
                    any)) {
    payloads.refuse(payload);
  }
  if (any && *static_cast<volatile uint32_t*>(&payloads.any[payload]) == 0) {
    atomicExch(&payloads.any[payload], 1u);
  }
}

template <typename Format>
Status queue_check_scales(const Segments& segments, const Format& format, const Payloads& payloads,
                          cudaStream_t stream) {
  return launch(check_scales<Format>, blocks_for(uint64_t{payloads.sources} * segments.scales),
                stream, segments, format, payloads);
}

}  // namespace gradwire::cuda
