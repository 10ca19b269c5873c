#include "codecs/half.h"
#include "codecs/registry.h"
#include "stages/element.h"

namespace gradwire {
namespace {

constexpr CodecInfo kInfo = {
    .id = 3,
    .name = "fp16",
    .summary = "IEEE binary16: five bits of exponent, ten of fraction, rounded half to even",
    .source = "the usual half-size baseline (PyTorch's fp16_compress_hook)",
    .error_feedback = false,
    .lossless = false,
    .parameters = {},
};

constexpr HalfFormat kFormat = {
    .info = &kInfo,
    .rounds_to_infinity = kF16RoundsToInfinity,
    .narrow = &Kernels::narrow_f16,
    .widen = &Kernels::widen_f16,
    .widen_add = &Kernels::widen_add_f16,
};

}  // namespace

const CodecEntry codec_entries::fp16 = {
    .info = &kInfo,
    .create = [](const Parameters&, ResidualType residual_type)
        -> Result<std::shared_ptr<const Codec>> { return create_half(kFormat, residual_type); },
    .from_wire = [](const WireCodec& wire, Dtype) { return half_from_wire(kFormat, wire); },
};

}  // namespace gradwire
