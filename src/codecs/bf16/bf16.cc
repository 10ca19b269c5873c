#include <algorithm>

#include "base/return_if_error.h"
#include "codecs/checks.h"
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

// Values a step that threads take one by one.
constexpr uint64_t kPieceSize = 65536;
// From these magnitude bits on, a float32 rounds to an infinite bfloat16: no finite residual is
// left.
constexpr uint32_t kRoundsToInfinity = 0x7f7f8000u;

template <typename Body>
void for_each_piece(uint64_t n, Execution& execution, const Body& body) {
  execution.for_each((n + kPieceSize - 1) / kPieceSize, [&](size_t piece) {
    const uint64_t begin = piece * kPieceSize;
    body(begin, std::min(kPieceSize, n - begin));
  });
}

class Bf16Codec final : public Codec {
 public:
  explicit Bf16Codec(ResidualType residual_type) : Codec(residual_type) {}

  const CodecInfo& info() const noexcept override { return kInfo; }
  WireCodec wire() const noexcept override { return {.id = kInfo.id}; }
  uint64_t max_payload_size(uint64_t n) const noexcept override { return n * sizeof(uint16_t); }

  Status check_size(uint64_t n, uint64_t size) const override {
    return check_payload_size(kInfo, n, sizeof(uint16_t), size);
  }

  Result<uint64_t> encode(std::span<const float> x, ResidualView residual, const DrawContext&,
                          std::span<std::byte> payload, Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    GW_RETURN_IF_ERROR(check_residual_size(kInfo, x.size(), residual));
    auto* out = reinterpret_cast<uint16_t*>(payload.data());
    if (residual.type() == ResidualType::kNone) {
      for_each_piece(x.size(), execution, [&](uint64_t begin, uint64_t n) {
        execution.kernels().narrow_bf16(x.data() + begin, n, out + begin);
      });
      return x.size() * sizeof(uint16_t);
    }
    GW_RETURN_IF_ERROR(check_finite(kInfo, x, residual, kRoundsToInfinity));
    for_each_piece(x.size(), execution, [&](uint64_t begin, uint64_t n) {
      for (uint64_t i = begin; i < begin + n; ++i) encode_with_residual(x[i], residual, i, out);
    });
    return x.size() * sizeof(uint16_t);
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_size(out.size(), payload.size()));
    const auto* x = reinterpret_cast<const uint16_t*>(payload.data());
    const Kernels& kernels = execution.kernels();
    const auto decode_piece =
        mode == DecodeMode::kStore ? kernels.widen_bf16 : kernels.widen_add_bf16;
    for_each_piece(out.size(), execution, [&](uint64_t begin, uint64_t n) {
      decode_piece(x + begin, n, out.data() + begin);
    });
    return {};
  }

 protected:
  std::string parameter_text() const override { return {}; }

 private:
  static void encode_with_residual(float x, const ResidualView& residual, uint64_t i,
                                   uint16_t* out) {
    const bool wide = residual.type() == ResidualType::kFloat32;
    const float sum = x + (wide ? residual.f32()[i] : widen_bf16(residual.bf16()[i]));
    const uint16_t sent = narrow_bf16(sum);
    store_unaligned(out + i, sent);
    const float left = sum - widen_bf16(sent);
    if (wide) {
      residual.f32()[i] = left;
    } else {
      residual.bf16()[i] = narrow_bf16(left);
    }
  }
};

}  // namespace

const CodecEntry codec_entries::bf16 = {
    .info = &kInfo,
    .create = [](const Parameters&,
                 ResidualType residual_type) -> Result<std::shared_ptr<const Codec>> {
      return std::shared_ptr<const Codec>(std::make_shared<Bf16Codec>(residual_type));
    },
    .from_wire = [](const WireCodec& wire) -> Result<std::shared_ptr<const Codec>> {
      GW_RETURN_IF_ERROR(check_no_wire_parameters(kInfo, wire));
      return std::shared_ptr<const Codec>(std::make_shared<Bf16Codec>(ResidualType::kNone));
    },
};

}  // namespace gradwire
