#include "codecs/half.h"

#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/chunks.h"
#include "codecs/input.h"
#include "codecs/scales.h"

namespace gradwire {
namespace {

class HalfCodec final : public Codec {
 public:
  HalfCodec(const HalfFormat& format, ResidualType residual_type)
      : Codec(residual_type), format_(format) {}

  const CodecInfo& info() const noexcept override { return *format_.info; }
  WireCodec wire() const noexcept override { return {.id = info().id}; }
  uint64_t max_payload_size(uint64_t n) const noexcept override { return n * sizeof(uint16_t); }

  Status check_size(uint64_t n, uint64_t size) const override {
    return check_payload_size(info(), n, sizeof(uint16_t), size);
  }

  Result<uint64_t> encode(const InputView& x, const ResidualView& residual, const DrawContext&,
                          std::span<std::byte> payload, Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    GW_RETURN_IF_ERROR(check_residual_size(info(), x.size(), residual));
    const Kernels& kernels = execution.kernels();
    const Input input(x, residual, kernels);
    if (input.keeps_residual()) {
      const uint32_t largest =
          for_each_absmax(input, Buckets(x.size(), 0), execution, [](uint64_t, uint32_t) {});
      if (largest >= format_.rounds_to_infinity) {
        return check_finite(info(), x, residual, format_.rounds_to_infinity);
      }
    }
    const ChunkShape shape = this->shape(x.size());
    return encode_chunks(shape, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
      auto* out = reinterpret_cast<uint16_t*>(slot);
      input.encode_parts(
          shape.begin(chunk), shape.values(chunk),
          [&](uint64_t first, uint64_t n, const float* b) {
            (kernels.*format_.narrow)(b, n, out + first);
          },
          [&](uint64_t first, uint64_t n, float* decoded) {
            (kernels.*format_.widen)(out + first, n, decoded);
          });
      return shape.room(chunk);
    });
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_size(out.size(), payload.size()));
    const auto widen =
        execution.kernels().*(mode == DecodeMode::kStore ? format_.widen : format_.widen_add);
    const ChunkShape shape = this->shape(out.size());
    return decode_chunks(shape, payload, info().name, execution,
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

  const HalfFormat& format_;
};

}  // namespace

std::shared_ptr<const Codec> create_half(const HalfFormat& format, ResidualType residual_type) {
  return std::make_shared<HalfCodec>(format, residual_type);
}

Result<std::shared_ptr<const Codec>> half_from_wire(const HalfFormat& format,
                                                    const WireCodec& wire) {
  GW_RETURN_IF_ERROR(check_no_wire_parameters(*format.info, wire));
  return create_half(format, ResidualType::kNone);
}

}  // namespace gradwire
