#include "codecs/half.h"
#include "codecs/registry.h"
#include "stages/element.h"

namespace gradwire {
namespace {

constexpr CodecInfo kInfo = {
    .id = 2,
    .name = "bf16",
    .summary = "bfloat16: the upper half of a float32, rounded half to even",
    .source = "the usual half-size baseline (PyTorch's bf16_compress_hook)",
    .error_feedback = false,
    .lossless = false,
    .parameters = {},
};

constexpr HalfFormat kFormat = {
    .info = &kInfo,
    .rounds_to_infinity = kRoundsToInfinity,
    .narrow = &Kernels::narrow_bf16,
    .widen = &Kernels::widen_bf16,
    .widen_add = &Kernels::widen_add_bf16,
};

}  // namespace

const CodecEntry codec_entries::bf16 = {
    .info = &kInfo,
    .create = [](const Parameters&, ResidualType residual_type)
        -> Result<std::shared_ptr<const Codec>> { return create_half(kFormat, residual_type); },
    .from_wire = [](const WireCodec& wire, Dtype) { return half_from_wire(kFormat, wire); },
};

}  // namespace gradwire
