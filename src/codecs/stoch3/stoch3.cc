#include "codecs/stoch3/stoch3.h"

#include "codecs/drawn_ternary.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"coder", "none", "none|zre|rice",
     "five values to a byte; the same with runs of zeros shortened; gaps in Golomb-Rice code"},
    {"bucket", "whole", "multiple of 320",
     "values that share a scale; by default the whole segment has one"},
};

class Stoch3Codec final : public DrawnTernaryCodec<Stoch3Codec, Stoch3Parameters> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 18,
      .name = "stoch3",
      .summary = "three values drawn so that their mean is the input, five to a byte",
      .source = "3LC (Lim, Andersen, Kaminsky; SysML 2019), section 4.2, \"Stoch 3-value b-3-5\"",
      .takes_feedback = false,
      .draws = true,
      .parameters = kParameters,
  };
  using DrawnTernaryCodec::DrawnTernaryCodec;

  static Stoch3Parameters parse(Parameters& given) {
    return {.coder = given.choice("coder", kTernaryCoders, TernaryCoder::kNone),
            .group_size = given.group_size(kDrawnGroupMultiple, 0)};
  }

  static Result<Stoch3Parameters> read(const WireCodec& wire, Dtype) {
    GW_RETURN_IF_ERROR(
        check_wire_bits(kInfo, wire.param_a, static_cast<uint32_t>(TernaryCoder::kRice)));
    GW_RETURN_IF_ERROR(check_wire_group_size(kInfo, wire, kDrawnGroupMultiple));
    return Stoch3Parameters{.coder = static_cast<TernaryCoder>(wire.param_a),
                            .group_size = wire.param_b};
  }

  WireCodec wire() const noexcept override {
    return {.id = kInfo.id,
            .param_a = static_cast<uint16_t>(parameters().coder),
            .param_b = parameters().group_size};
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_choice(text, "coder", kTernaryCoders, parameters().coder, TernaryCoder::kNone);
    append_group_size(text, parameters().group_size, 0);
    return text;
  }
};

}  // namespace

const CodecEntry codec_entries::stoch3 = entry<Stoch3Codec>();

}  // namespace gradwire
