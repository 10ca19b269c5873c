#include "codecs/half.h"
#include "stages/element/bfloat16.h"

namespace gradwire {
namespace {

struct Bf16Codec final : HalfCodec<Bf16Codec> {
  static constexpr CodecInfo kInfo = {
      .id = 2,
      .name = "bf16",
      .summary = "bfloat16: the upper half of a float32, rounded half to even",
      .source = "the usual half-size baseline (PyTorch's bf16_compress_hook)",
      .carries_non_finite = true,
  };
  static constexpr uint32_t kInfiniteFrom = kRoundsToInfinity;
  static constexpr auto kNarrow = &Kernels::narrow_bf16;
  static constexpr auto kWiden = &Kernels::widen_bf16;
  using HalfCodec::HalfCodec;
};

}  // namespace

const CodecEntry codec_entries::bf16 = entry<Bf16Codec>();

}  // namespace gradwire
