#pragma once

// The payloads that a call decodes, and the check of the scales in their heads. A format says what
// scales look like:
//
//   static constexpr uint32_t kScaleBytes;  // of one scale; 0: there are none
//   // Whether the scale at `scale` is a valid one; `any` becomes whether it is not 0.
//   __device__ bool valid(const uint8_t* scale, bool& any) const;

#include <cstdint>

#include "cuda/common/codec_kernels.h"
#include "cuda/common/unaligned.cuh"
#include "stages/element/float_bits.h"

namespace gradwire::cuda {

GW_HOST_DEVICE inline bool divides(float divisor) { return divisor != 0.0f && divisor != 1.0f; }

// Payloads are numbered source by source: first those of all segments from the first source.
struct Payloads {
  const uint8_t* bytes;
  const PayloadPlace* places;
  DecodedSegment* decoded;
  uint32_t sources;
  float* out;
  DecodeMode mode;  // of the first source
  float divisor;
  uint32_t* any_scale;  // of each payload: whether one of its scales is not 0

  // with_scales: how many payloads have scales.
  Payloads(Call& call, const DecodeArguments& arguments, uint64_t with_scales)
      : bytes(reinterpret_cast<const uint8_t*>(arguments.payloads_dev)),
        places(arguments.places_dev),
        decoded(arguments.decoded_dev),
        sources(arguments.sources),
        out(arguments.out_dev),
        mode(arguments.mode),
        divisor(arguments.divisor),
        any_scale(call.take<uint32_t>(with_scales)) {}

  __device__ void refuse(uint64_t payload) const { atomicExch(&decoded[payload].valid, 0u); }
  // Whether there are bytes to decode, after the checks so far.
  __device__ bool has_values(uint64_t payload) const {
    return decoded[payload].valid != 0 && decoded[payload].empty == 0;
  }
};

// Scales that are a float each, finite and with a clear sign bit.
struct FloatScales {
  static constexpr uint32_t kScaleBytes = sizeof(float);
  using Scale = float;

  __device__ static Scale load(const uint8_t* scale) {
    return float_of(load_word<uint32_t>(scale));
  }
  __device__ static bool valid(const uint8_t* scale, bool& any) {
    const auto bits = load_word<uint32_t>(scale);
    any = bits != 0;
    return bits < kNonFiniteBits;
  }
};

// For payloads that have no scales.
struct NoScales {
  static constexpr uint32_t kScaleBytes = 0;
  struct Scale {};

  __device__ static Scale load(const uint8_t*) { return {}; }
};

// Refuses payloads with an invalid scale, and finds those with a scale that is not 0. Each thread
// checks one scale. What `decoded` says of the sizes stands there already, and `any_scale` is 0.
template <typename Format>
GW_KERNEL void check_scales(Segments segments, Format format, Payloads payloads) {
  const uint64_t thread = thread_number();
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
  if (any && *static_cast<volatile uint32_t*>(&payloads.any_scale[payload]) == 0) {
    atomicExch(&payloads.any_scale[payload], 1u);
  }
}

template <typename Format>
void queue_check_scales(Call& call, const Format& format, const Payloads& payloads) {
  if constexpr (Format::kScaleBytes > 0) {
    call.launch(check_scales<Format>, blocks_for(uint64_t{payloads.sources} * call.segments.scales),
                format, payloads);
  }
}

}  // namespace gradwire::cuda
