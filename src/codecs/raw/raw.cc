// The smallest complete codec: copy this folder to begin a new one.

#include <cstring>

#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/registry.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

constexpr CodecInfo kInfo = {
    .id = 1,
    .name = "raw",
    .summary = "float32 as it is",
    .source = "the uncompressed baseline",
    .error_feedback = false,
    .lossless = true,
    .parameters = {},
};

class RawCodec final : public Codec {
 public:
  explicit RawCodec(ResidualType residual_type) : Codec(residual_type) {}

  const CodecInfo& info() const noexcept override { return kInfo; }
  WireCodec wire() const noexcept override { return {.id = kInfo.id}; }
  uint64_t max_payload_size(uint64_t n) const noexcept override { return n * sizeof(float); }

  Status check_size(uint64_t n, uint64_t size) const override {
    return check_payload_size(kInfo, n, sizeof(float), size);
  }

  Result<uint64_t> encode(std::span<const float> x, ResidualView, const DrawContext&,
                          std::span<std::byte> payload, Execution&) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    if (!x.empty()) std::memcpy(payload.data(), x.data(), x.size_bytes());
    return x.size_bytes();
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_size(out.size(), payload.size()));
    if (out.empty()) return {};
    if (mode == DecodeMode::kStore) {
      std::memcpy(out.data(), payload.data(), payload.size());
    } else {
      execution.kernels().add_f32(reinterpret_cast<const float*>(payload.data()), out.size(),
                                  out.data());
    }
    return {};
  }

 protected:
  std::string parameter_text() const override { return {}; }
};

}  // namespace

const CodecEntry codec_entries::raw = {
    .info = &kInfo,
    .create = [](const Parameters&,
                 ResidualType residual_type) -> Result<std::shared_ptr<const Codec>> {
      return std::shared_ptr<const Codec>(std::make_shared<RawCodec>(residual_type));
    },
    .from_wire = [](const WireCodec& wire) -> Result<std::shared_ptr<const Codec>> {
      GW_RETURN_IF_ERROR(check_no_wire_parameters(kInfo, wire));
      return std::shared_ptr<const Codec>(std::make_shared<RawCodec>(ResidualType::kNone));
    },
};

}  // namespace gradwire
