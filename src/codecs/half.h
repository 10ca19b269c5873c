#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "gradwire/codec.h"
#include "stages/kernels.h"

namespace gradwire {

// A codec of 16 bits a value, each converted by itself.
struct HalfFormat {
  const CodecInfo* info;
  // From these magnitude bits on, a float32 becomes infinite: no finite residual would be left.
  uint32_t rounds_to_infinity;
  void (*Kernels::*narrow)(const float* x, size_t n, uint16_t* out);
  void (*Kernels::*widen)(const uint16_t* x, size_t n, float* out);
  void (*Kernels::*widen_add)(const uint16_t* x, size_t n, float* out);
};

std::shared_ptr<const Codec> create_half(const HalfFormat& format, ResidualType residual_type);
Result<std::shared_ptr<const Codec>> half_from_wire(const HalfFormat& format,
                                                    const WireCodec& wire);

}  // namespace gradwire
