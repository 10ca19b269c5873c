#include "codecs/terngrad/terngrad.h"

#include <algorithm>

#include "codecs/drawn_ternary.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"clip", "2.5", "[0, 16)",
     "values are clipped to so many times the standard deviation; 0: they are not"},
    {"pack", "2bit", "2bit|trits5", "four values to a byte as in the paper, or five"},
    {"coder", "none", "none|zre|rice",
     "with trits5: runs of zeros shortened, or gaps in Golomb-Rice code"},
    {"bucket", "whole", "multiple of 320",
     "values that share a scale; by default the whole segment has one"},
};

constexpr std::string_view kPacks[] = {"2bit", "trits5"};
constexpr float kClipUnits = 1024.0f;  // param_a holds clip times this

class TernGradCodec final : public DrawnTernaryCodec<TernGradCodec, TernGradParameters> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 17,
      .name = "terngrad",
      .summary = "three values drawn so that their mean is the clipped input, two bits each",
      .source = "TernGrad (Wen et al., NeurIPS 2017), sections 3 and 3.3",
      .takes_feedback = false,
      .draws = true,
      .shares_scales = true,
      .parameters = kParameters,
  };
  using DrawnTernaryCodec::DrawnTernaryCodec;

  static TernGradParameters parse(Parameters& given) {
    const TernGradParameters defaults;
    const bool trits5 = given.choice("pack", kPacks, false);
    const TernaryCoder coder = given.choice("coder", kTernaryCoders, TernaryCoder::kNone);
    if (!trits5 && coder != TernaryCoder::kNone) {
      given.fail("a coder works on five values to a byte; add pack=trits5");
    }
    return {.clip = given.number("clip", 0.0f, 16.0f, defaults.clip),
            .coder = trits5 ? coder : TernaryCoder::kTwoBit,
            .group_size = given.group_size(kDrawnGroupMultiple, 0)};
  }

  static Result<TernGradParameters> read(const WireCodec& wire, Dtype) {
    GW_RETURN_IF_ERROR(check_wire_group_size(kInfo, wire, kDrawnGroupMultiple));
    return TernGradParameters{
        .clip = std::min(static_cast<float>(stated_number(wire.param_a, kClipUnits, 1e3)), 15.999f),
        .coder = stated_coder(wire.param_a),
        .group_size = wire.param_b};
  }

  WireCodec wire() const noexcept override {
    return {.id = kInfo.id,
            .param_a = pack_param_a(parameters().coder, parameters().clip, kClipUnits),
            .param_b = parameters().group_size};
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    if (parameters().clip != TernGradParameters().clip) {
      append_parameter(text, "clip", format_number(parameters().clip));
    }
    if (parameters().coder != TernaryCoder::kTwoBit) {
      append_parameter(text, "pack", "trits5");
      append_choice(text, "coder", kTernaryCoders, parameters().coder, TernaryCoder::kNone);
    }
    append_group_size(text, parameters().group_size, 0);
    return text;
  }
};

}  // namespace

const CodecEntry codec_entries::terngrad = entry<TernGradCodec>();

}  // namespace gradwire
