#include "codecs/terngrad/terngrad.h"

#include <algorithm>
#include <string>

#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/drawn_ternary.h"
#include "codecs/registry.h"
#include "codecs/ternary.h"
#include "codecs/ternary_parameters.h"

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

constexpr CodecInfo kInfo = {
    .id = 17,
    .name = "terngrad",
    .summary = "three values drawn so that their mean is the clipped input, two bits each",
    .source = "TernGrad (Wen et al., NeurIPS 2017), sections 3 and 3.3",
    .error_feedback = false,
    .lossless = false,
    .parameters = kParameters,
};

constexpr float kClipUnits = 1024.0f;  // in param_a

class TernGradCodec final : public Codec {
 public:
  TernGradCodec(TernGradParameters parameters, ResidualType residual_type)
      : Codec(residual_type), parameters_(parameters) {}

  const CodecInfo& info() const noexcept override { return kInfo; }
  const TernGradParameters& parameters() const { return parameters_; }

  WireCodec wire() const noexcept override {
    return {.id = kInfo.id,
            .param_a = tell_number(parameters_.coder, parameters_.clip, kClipUnits),
            .param_b = parameters_.bucket};
  }

  uint64_t max_payload_size(uint64_t n) const noexcept override {
    return parameters_.shape(n).max_size();
  }

  Status check_size(uint64_t n, uint64_t size) const override {
    return check_ternary_size(parameters_.shape(n), kInfo.name, size);
  }

  Result<uint64_t> encode(const InputView& x, const ResidualView& residual, const DrawContext& draw,
                          std::span<std::byte> payload, Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    GW_RETURN_IF_ERROR(check_residual_size(kInfo, x.size(), residual));
    return encode_drawn_ternary(kInfo, parameters_.shape(x.size()), parameters_.clip, x, residual,
                                draw, payload, execution);
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    return decode_ternary(parameters_.shape(out.size()), kInfo.name, payload, out, mode, execution);
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    if (parameters_.clip != TernGradParameters().clip) {
      append_parameter(text, "clip", format_number(parameters_.clip));
    }
    if (parameters_.coder != TernaryCoder::kTwoBit) {
      append_parameter(text, "pack", "trits5");
      append_coder(text, parameters_.coder, TernaryCoder::kNone);
    }
    append_bucket(text, parameters_.bucket, 0);
    return text;
  }

 private:
  TernGradParameters parameters_;
};

Result<std::shared_ptr<const Codec>> create(const Parameters& given, ResidualType residual_type) {
  TernGradParameters parameters;
  Result<float> clip = given.number("clip", 0.0f, 16.0f, parameters.clip);
  if (!clip.ok()) return clip.status();
  Result<size_t> pack = given.choice("pack", {"2bit", "trits5"}, 0);
  if (!pack.ok()) return pack.status();
  Result<TernaryCoder> coder = parse_coder(given, TernaryCoder::kNone);
  if (!coder.ok()) return coder.status();
  Result<uint32_t> bucket = given.bucket(kDrawnBucketMultiple, 0);
  if (!bucket.ok()) return bucket.status();
  if (pack.value() == 0 && coder.value() != TernaryCoder::kNone) {
    return Status(StatusCode::kBadParameter,
                  "codec 'terngrad': a coder works on five values to a byte; add pack=trits5");
  }
  parameters.clip = clip.value();
  parameters.coder = pack.value() == 0 ? TernaryCoder::kTwoBit : coder.value();
  parameters.bucket = bucket.value();
  return std::shared_ptr<const Codec>(std::make_shared<TernGradCodec>(parameters, residual_type));
}

Result<std::shared_ptr<const Codec>> from_wire(const WireCodec& wire, Dtype) {
  GW_RETURN_IF_ERROR(check_wire_bucket(kInfo, wire, kDrawnBucketMultiple));
  const TernGradParameters parameters = {
      .clip = std::min(told_number(wire.param_a, kClipUnits, 1e3f), 15.999f),
      .coder = told_coder(wire.param_a),
      .bucket = wire.param_b};
  return std::shared_ptr<const Codec>(
      std::make_shared<TernGradCodec>(parameters, ResidualType::kNone));
}

}  // namespace

std::optional<TernGradParameters> terngrad_parameters(const Codec& codec) {
  const auto* terngrad = dynamic_cast<const TernGradCodec*>(&codec);
  return terngrad == nullptr ? std::nullopt : std::optional(terngrad->parameters());
}

const CodecEntry codec_entries::terngrad = {
    .info = &kInfo, .create = create, .from_wire = from_wire};

}  // namespace gradwire
