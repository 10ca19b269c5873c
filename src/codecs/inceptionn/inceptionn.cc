#include "codecs/inceptionn/inceptionn.h"

#include <iterator>
#include <string>

#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/chunks.h"
#include "codecs/input.h"
#include "codecs/registry.h"
#include "codecs/scales.h"
#include "stages/element.h"
#include "stages/float_clip.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"bound", "10", "10|8|6", "values below 2^-bound are not sent"},
    {"mode", "paper", "paper|strict",
     "paper: errors up to 2^-7 where a value takes 8 bits; strict: never above 2^-bound"},
};

constexpr CodecInfo kInfo = {
    .id = 7,
    .name = "inceptionn",
    .summary = "floats cut to 0, 8, 16 or 32 bits by their size, for an absolute error bound",
    .source = "INCEPTIONN (Li et al.; MICRO 2018), section V",
    .error_feedback = false,
    .lossless = false,
    .parameters = kParameters,
};

// Bits of param_a (codecs/inceptionn/spec.md).
constexpr uint16_t kBoundMask = 3;
constexpr int kModeShift = 2;
constexpr int kBounds[] = {10, 8, 6};

struct InceptionnParameters {
  uint16_t bound = 0;  // place in kBounds
  ClipMode mode = ClipMode::kPaper;
};

class InceptionnCodec final : public Codec {
 public:
  InceptionnCodec(InceptionnParameters parameters, ResidualType residual_type)
      : Codec(residual_type),
        parameters_(parameters),
        clip_(float_clip(kBounds[parameters.bound], parameters.mode)) {}

  const CodecInfo& info() const noexcept override { return kInfo; }

  [[nodiscard]] const FloatClip& clip() const { return clip_; }

  WireCodec wire() const noexcept override {
    const auto mode = static_cast<uint16_t>(parameters_.mode);
    return {.id = kInfo.id,
            .param_a = static_cast<uint16_t>(parameters_.bound | mode << kModeShift)};
  }

  uint64_t max_payload_size(uint64_t n) const noexcept override { return shape(n).max_size(); }

  Status check_size(uint64_t n, uint64_t size) const override {
    const ChunkShape shape = this->shape(n);
    const uint64_t least = shape.chunks_offset() + tags_size(n);
    if (size >= least && size <= shape.max_size()) return {};
    return corrupt_payload(kInfo.name, std::to_string(n) + " values take " + std::to_string(least) +
                                           " to " + std::to_string(shape.max_size()) +
                                           " bytes, the payload has " + std::to_string(size));
  }

  Result<uint64_t> encode(const InputView& x, const ResidualView& residual, const DrawContext&,
                          std::span<std::byte> payload, Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    GW_RETURN_IF_ERROR(check_residual_size(kInfo, x.size(), residual));
    const Kernels& kernels = execution.kernels();
    const Input input(x, residual, kernels);
    if (input.keeps_residual()) {
      const uint32_t largest =
          for_each_absmax(input, Buckets(x.size(), 0), execution, [](uint64_t, uint32_t) {});
      if (largest >= kNonFiniteBits) return check_finite(kInfo, x, residual);
    }
    const ChunkShape shape = this->shape(x.size());
    return encode_chunks(shape, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
      uint8_t* part = slot;
      uint64_t part_size = 0;
      input.encode_parts(
          shape.begin(chunk), shape.values(chunk),
          [&](uint64_t, uint64_t n, const float* b) {
            part += part_size;
            part_size = kernels.float_clip_encode(b, n, clip_, part);
          },
          [&](uint64_t, uint64_t n, float* decoded) {
            kernels.float_clip_decode(part, part_size, n, decoded);
          });
      return static_cast<uint64_t>(part - slot) + part_size;
    });
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_size(out.size(), payload.size()));
    const Kernels& kernels = execution.kernels();
    const auto decode_bursts =
        mode == DecodeMode::kStore ? kernels.float_clip_decode : kernels.float_clip_decode_add;
    const ChunkShape shape = this->shape(out.size());
    return decode_chunks(shape, payload, kInfo.name, execution,
                         [&](uint64_t chunk, std::span<const uint8_t> bytes) {
                           return decode_bursts(bytes.data(), bytes.size(), shape.values(chunk),
                                                out.data() + shape.begin(chunk));
                         });
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    if (parameters_.bound != 0) {
      append_parameter(text, "bound", std::to_string(kBounds[parameters_.bound]));
    }
    if (parameters_.mode == ClipMode::kStrict) append_parameter(text, "mode", "strict");
    return text;
  }

 private:
  // Bytes of the tags alone; whole bursts fill a chunk.
  static uint64_t tags_size(uint64_t n) {
    return (n / kBurstValues + (n % kBurstValues != 0)) * kBurstTagBytes;
  }
  static ChunkShape shape(uint64_t n) {
    return {n, 0, ChunkShape::Sizes::kVarying,
            [](uint64_t values) { return tags_size(values) + values * sizeof(float); }};
  }

  InceptionnParameters parameters_;
  FloatClip clip_;
};

Result<std::shared_ptr<const Codec>> create(const Parameters& given, ResidualType residual_type) {
  Result<size_t> bound = given.choice("bound", {"10", "8", "6"}, 0);
  if (!bound.ok()) return bound.status();
  Result<size_t> mode = given.choice("mode", {"paper", "strict"}, 0);
  if (!mode.ok()) return mode.status();
  const InceptionnParameters parameters = {.bound = static_cast<uint16_t>(bound.value()),
                                           .mode = static_cast<ClipMode>(mode.value())};
  return std::shared_ptr<const Codec>(std::make_shared<InceptionnCodec>(parameters, residual_type));
}

Result<std::shared_ptr<const Codec>> from_wire(const WireCodec& wire, Dtype) {
  const InceptionnParameters parameters = {
      .bound = static_cast<uint16_t>(wire.param_a & kBoundMask),
      .mode = static_cast<ClipMode>(wire.param_a >> kModeShift & 1)};
  if (parameters.bound >= std::size(kBounds)) {
    return Status(StatusCode::kReservedBits, "inceptionn: bound 3 is reserved");
  }
  if (wire.param_a >> (kModeShift + 1) != 0 || wire.param_b != 0) {
    return Status(StatusCode::kReservedBits, "inceptionn: reserved parameter bits are set");
  }
  return std::shared_ptr<const Codec>(
      std::make_shared<InceptionnCodec>(parameters, ResidualType::kNone));
}

}  // namespace

std::optional<FloatClip> inceptionn_clip(const Codec& codec) {
  const auto* inceptionn = dynamic_cast<const InceptionnCodec*>(&codec);
  return inceptionn == nullptr ? std::nullopt : std::optional(inceptionn->clip());
}

const CodecEntry codec_entries::inceptionn = {
    .info = &kInfo, .create = create, .from_wire = from_wire};

}  // namespace gradwire
