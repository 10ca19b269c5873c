#include "codecs/three_lc/three_lc.h"

#include <algorithm>
#include <cmath>

#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/registry.h"
#include "codecs/three_lc/transform.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"s", "1", "[1, 2)", "sparsity multiplier: larger sends fewer values, each standing for more"},
    {"coder", "zre", "zre|none", "zero-run coding of the packed trits, or none"},
    {"bucket", "whole", "multiple of 5",
     "values that share a scale; by default the whole segment has one"},
};

constexpr CodecInfo kInfo = {
    .id = 16,
    .name = "3lc",
    .summary = "three values with a sparsity multiplier, five to a byte, zero runs shortened",
    .source = "3LC (Lim, Andersen, Kaminsky; SysML 2019), section 3",
    .error_feedback = true,
    .lossless = false,
    .parameters = kParameters,
};

// Bits of param_a (codecs/three_lc/spec.md).
constexpr uint16_t kCoderMask = 3;
constexpr int kSparsityShift = 2;
constexpr float kSparsityUnit = 16384.0f;
constexpr uint32_t kMaxBucket = 0xffffffffu / 5 * 5;

class ThreeLcCodec final : public Codec {
 public:
  ThreeLcCodec(ThreeLcParameters parameters, ResidualType residual_type)
      : Codec(residual_type), parameters_(parameters) {}

  const CodecInfo& info() const noexcept override { return kInfo; }

  WireCodec wire() const noexcept override {
    // s is told to whoever inspects a frame; no decoder needs it.
    const long sparsity = std::lround((parameters_.sparsity - 1.0f) * kSparsityUnit);
    const auto told = static_cast<uint16_t>(std::min(sparsity, 16383L));
    return {.id = kInfo.id,
            .param_a = static_cast<uint16_t>(static_cast<uint16_t>(parameters_.coder) |
                                             static_cast<uint16_t>(told << kSparsityShift)),
            .param_b = parameters_.bucket};
  }

  uint64_t max_payload_size(uint64_t n) const noexcept override {
    return ThreeLcShape(n, parameters_).max_size();
  }

  Status check_size(uint64_t n, uint64_t size) const override {
    return check_three_lc_size(parameters_, n, size);
  }

  Result<uint64_t> encode(std::span<const float> x, ResidualView residual, const DrawContext&,
                          std::span<std::byte> payload, Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    GW_RETURN_IF_ERROR(check_residual_size(kInfo, x.size(), residual));
    if (x.empty()) return 0;
    Result<uint64_t> size = encode_three_lc(parameters_, x, residual, payload, execution);
    if (!size.ok()) return check_finite(kInfo, x, residual);
    return size;
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    return decode_three_lc(parameters_, payload, out, mode, execution);
  }

 protected:
  std::string parameter_text() const override {
    std::string text = "s=" + format_number(parameters_.sparsity);
    if (parameters_.coder == TernaryCoder::kNone) text += ",coder=none";
    if (parameters_.bucket != 0) text += ",bucket=" + std::to_string(parameters_.bucket);
    return text;
  }

 private:
  ThreeLcParameters parameters_;
};

Result<std::shared_ptr<const Codec>> create(const Parameters& given, ResidualType residual_type) {
  ThreeLcParameters parameters;
  Result<float> sparsity = given.number("s", 1.0f, 2.0f, parameters.sparsity);
  if (!sparsity.ok()) return sparsity.status();
  Result<size_t> coder = given.choice("coder", {"none", "zre"}, 1);
  if (!coder.ok()) return coder.status();
  Result<uint32_t> bucket = given.count("bucket", 5, kMaxBucket, 0);
  if (!bucket.ok()) return bucket.status();
  parameters.sparsity = sparsity.value();
  parameters.coder = static_cast<TernaryCoder>(coder.value());
  parameters.bucket = bucket.value();
  return std::shared_ptr<const Codec>(std::make_shared<ThreeLcCodec>(parameters, residual_type));
}

Result<std::shared_ptr<const Codec>> from_wire(const WireCodec& wire) {
  const uint16_t coder = wire.param_a & kCoderMask;
  if (coder > static_cast<uint16_t>(TernaryCoder::kZeroRun)) {
    return Status(StatusCode::kReservedBits,
                  "3lc: coder " + std::to_string(coder) + " is reserved");
  }
  if (wire.param_b % 5 != 0) {
    return Status(StatusCode::kReservedBits,
                  "3lc: bucket " + std::to_string(wire.param_b) + " is not a multiple of 5");
  }
  // The unit is coarser than a float: rounded to four decimals, s reads as it was given.
  const float told = static_cast<float>(wire.param_a >> kSparsityShift) / kSparsityUnit;
  const ThreeLcParameters parameters = {
      .sparsity = std::min(1.0f + std::round(told * 1e4f) / 1e4f, 1.9999f),
      .coder = static_cast<TernaryCoder>(coder),
      .bucket = wire.param_b};
  return std::shared_ptr<const Codec>(
      std::make_shared<ThreeLcCodec>(parameters, ResidualType::kFloat32));
}

}  // namespace

const CodecEntry codec_entries::three_lc = {
    .info = &kInfo, .create = create, .from_wire = from_wire};

}  // namespace gradwire
