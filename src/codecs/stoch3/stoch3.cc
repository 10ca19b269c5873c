#include "codecs/stoch3/stoch3.h"

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
    {"coder", "none", "none|zre|rice",
     "five values to a byte; the same with runs of zeros shortened; gaps in Golomb-Rice code"},
    {"bucket", "whole", "multiple of 320",
     "values that share a scale; by default the whole segment has one"},
};

constexpr CodecInfo kInfo = {
    .id = 18,
    .name = "stoch3",
    .summary = "three values drawn so that their mean is the input, five to a byte",
    .source = "3LC (Lim, Andersen, Kaminsky; SysML 2019), section 4.2, \"Stoch 3-value + QE\"",
    .error_feedback = false,
    .lossless = false,
    .parameters = kParameters,
};

class Stoch3Codec final : public Codec {
 public:
  Stoch3Codec(Stoch3Parameters parameters, ResidualType residual_type)
      : Codec(residual_type), parameters_(parameters) {}

  const CodecInfo& info() const noexcept override { return kInfo; }
  const Stoch3Parameters& parameters() const { return parameters_; }

  WireCodec wire() const noexcept override {
    return {.id = kInfo.id,
            .param_a = static_cast<uint16_t>(parameters_.coder),
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
    return encode_drawn_ternary(kInfo, parameters_.shape(x.size()), /*clip=*/0.0f, x, residual,
                                draw, payload, execution);
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    return decode_ternary(parameters_.shape(out.size()), kInfo.name, payload, out, mode, execution);
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_coder(text, parameters_.coder, TernaryCoder::kNone);
    append_bucket(text, parameters_.bucket, 0);
    return text;
  }

 private:
  Stoch3Parameters parameters_;
};

Result<std::shared_ptr<const Codec>> create(const Parameters& given, ResidualType residual_type) {
  Result<TernaryCoder> coder = parse_coder(given, TernaryCoder::kNone);
  if (!coder.ok()) return coder.status();
  Result<uint32_t> bucket = given.bucket(kDrawnBucketMultiple, 0);
  if (!bucket.ok()) return bucket.status();
  const Stoch3Parameters parameters = {.coder = coder.value(), .bucket = bucket.value()};
  return std::shared_ptr<const Codec>(std::make_shared<Stoch3Codec>(parameters, residual_type));
}

Result<std::shared_ptr<const Codec>> from_wire(const WireCodec& wire, Dtype) {
  GW_RETURN_IF_ERROR(
      check_wire_bits(kInfo, wire.param_a, static_cast<uint32_t>(TernaryCoder::kRice)));
  GW_RETURN_IF_ERROR(check_wire_bucket(kInfo, wire, kDrawnBucketMultiple));
  const Stoch3Parameters parameters = {.coder = static_cast<TernaryCoder>(wire.param_a),
                                       .bucket = wire.param_b};
  return std::shared_ptr<const Codec>(
      std::make_shared<Stoch3Codec>(parameters, ResidualType::kNone));
}

}  // namespace

std::optional<Stoch3Parameters> stoch3_parameters(const Codec& codec) {
  const auto* stoch3 = dynamic_cast<const Stoch3Codec*>(&codec);
  return stoch3 == nullptr ? std::nullopt : std::optional(stoch3->parameters());
}

const CodecEntry codec_entries::stoch3 = {.info = &kInfo, .create = create, .from_wire = from_wire};

}  // namespace gradwire
