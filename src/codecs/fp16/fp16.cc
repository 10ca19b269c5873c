#include "codecs/half.h"
#include "stages/half/float16.h"

namespace gradwire {
namespace {

struct Fp16Codec final : HalfCodec<Fp16Codec> {
  static constexpr CodecInfo kInfo = {
      .id = 3,
      .name = "fp16",
      .summary = "IEEE binary16: five bits of exponent, ten of fraction, rounded half to even",
      .source = "the usual half-size baseline (PyTorch's fp16_compress_hook)",
      .carries_non_finite = true,
  };
  static constexpr uint32_t kInfiniteFrom = kF16RoundsToInfinity;
  static constexpr auto kNarrow = &Kernels::narrow_f16;
  static constexpr auto kWiden = &Kernels::widen_f16;
  using HalfCodec::HalfCodec;
};

}  // namespace

const CodecEntry codec_entries::fp16 = entry<Fp16Codec>();

}  // namespace gradwire
