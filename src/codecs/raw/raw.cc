// The smallest complete codec: copy this folder to begin a new one.

#include "codecs/raw/raw.h"

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
  // dtype: of the values in payloads that are decoded.
  explicit RawCodec(Dtype dtype) : Codec(ResidualType::kNone), dtype_(dtype) {}

  const CodecInfo& info() const noexcept override { return kInfo; }
  RawParameters parameters() const { return {.dtype = dtype_}; }
  WireCodec wire() const noexcept override { return {.id = kInfo.id}; }
  uint64_t max_payload_size(uint64_t n) const noexcept override { return n * sizeof(float); }

  Status check_size(uint64_t n, uint64_t size) const override {
    return check_payload_size(kInfo, n, size_of(dtype_), size);
  }

  Result<uint64_t> encode(const InputView& x, const ResidualView&, const DrawContext&,
                          std::span<std::byte> payload, Execution&) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    const uint64_t size = x.size() * size_of(x.dtype());
    if (!x.empty()) std::memcpy(payload.data(), x.data(), size);
    return size;
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_size(out.size(), payload.size()));
    if (out.empty()) return {};
    const Kernels& kernels = execution.kernels();
    const auto* halves = reinterpret_cast<const uint16_t*>(payload.data());
    const bool store = mode == DecodeMode::kStore;
    if (dtype_ == Dtype::kBfloat16) {
      (store ? kernels.widen_bf16 : kernels.widen_add_bf16)(halves, out.size(), out.data());
    } else if (dtype_ == Dtype::kFloat16) {
      (store ? kernels.widen_f16 : kernels.widen_add_f16)(halves, out.size(), out.data());
    } else if (store) {
      std::memcpy(out.data(), payload.data(), payload.size());
    } else {
      kernels.add_f32(reinterpret_cast<const float*>(payload.data()), out.size(), out.data());
    }
    return {};
  }

 protected:
  std::string parameter_text() const override { return {}; }

 private:
  Dtype dtype_;
};

}  // namespace

std::optional<RawParameters> raw_parameters(const Codec& codec) {
  const auto* raw = dynamic_cast<const RawCodec*>(&codec);
  return raw == nullptr ? std::nullopt : std::optional(raw->parameters());
}

const CodecEntry codec_entries::raw = {
    .info = &kInfo,
    .create = [](const Parameters&, ResidualType) -> Result<std::shared_ptr<const Codec>> {
      return std::shared_ptr<const Codec>(std::make_shared<RawCodec>(Dtype::kFloat32));
    },
    .from_wire = [](const WireCodec& wire, Dtype dtype) -> Result<std::shared_ptr<const Codec>> {
      GW_RETURN_IF_ERROR(check_no_wire_parameters(kInfo, wire));
      return std::shared_ptr<const Codec>(std::make_shared<RawCodec>(dtype));
    },
};

}  // namespace gradwire
