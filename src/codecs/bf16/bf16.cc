#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/chunks.h"
#include "codecs/input.h"
#include "codecs/registry.h"
#include "stages/element.h"
#include "stages/kernels.h"

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

class Bf16Codec final : public Codec {
 public:
  explicit Bf16Codec(ResidualType residual_type) : Codec(residual_type) {}

  const CodecInfo& info() const noexcept override { return kInfo; }
  WireCodec wire() const noexcept override { return {.id = kInfo.id}; }
  uint64_t max_payload_size(uint64_t n) const noexcept override { return n * sizeof(uint16_t); }

  Status check_size(uint64_t n, uint64_t size) const override {
    return check_payload_size(kInfo, n, sizeof(uint16_t), size);
  }

  Result<uint64_t> encode(const InputView& x, const ResidualView& residual, const DrawContext&,
                          std::span<std::byte> payload, Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    GW_RETURN_IF_ERROR(check_residual_size(kInfo, x.size(), residual));
    const Kernels& kernels = execution.kernels();
    const Input input(x, residual, kernels);
    if (input.keeps_residual()) {
      GW_RETURN_IF_ERROR(check_finite(kInfo, x, residual, kRoundsToInfinity));
    }
    const ChunkShape shape = this->shape(x.size());
    return encode_chunks(shape, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
      auto* out = reinterpret_cast<uint16_t*>(slot);
      input.encode_parts(
          shape.begin(chunk), shape.values(chunk),
          [&](uint64_t first, uint64_t n, const float* b) {
            kernels.narrow_bf16(b, n, out + first);
          },
          [&](uint64_t first, uint64_t n, float* decoded) {
            kernels.widen_bf16(out + first, n, decoded);
          });
      return shape.room(chunk);
    });
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_size(out.size(), payload.size()));
    const Kernels& kernels = execution.kernels();
    const auto widen = mode == DecodeMode::kStore ? kernels.widen_bf16 : kernels.widen_add_bf16;
    const ChunkShape shape = this->shape(out.size());
    return decode_chunks(shape, payload, kInfo.name, execution,
                         [&](uint64_t chunk, std::span<const uint8_t> bytes) {
                           widen(reinterpret_cast<const uint16_t*>(bytes.data()),
                                 shape.values(chunk), out.data() + shape.begin(chunk));
                           return true;
                         });
  }

 protected:
  std::string parameter_text() const override { return {}; }

 private:
  static ChunkShape shape(uint64_t n) {
    return {n, 0, ChunkShape::Sizes::kFixed,
            [](uint64_t values) { return values * sizeof(uint16_t); }};
  }
};

}  // namespace

const CodecEntry codec_entries::bf16 = {
    .info = &kInfo,
    .create = [](const Parameters&,
                 ResidualType residual_type) -> Result<std::shared_ptr<const Codec>> {
      return std::shared_ptr<const Codec>(std::make_shared<Bf16Codec>(residual_type));
    },
    .from_wire = [](const WireCodec& wire, Dtype) -> Result<std::shared_ptr<const Codec>> {
      GW_RETURN_IF_ERROR(check_no_wire_parameters(kInfo, wire));
      return std::shared_ptr<const Codec>(std::make_shared<Bf16Codec>(ResidualType::kNone));
    },
};

}  // namespace gradwire
