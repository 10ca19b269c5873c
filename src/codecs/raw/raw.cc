#include "codecs/raw/raw.h"

#include <algorithm>
#include <cstring>

#include "codecs/checks.h"
#include "codecs/input.h"
#include "codecs/registry.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

class RawCodec final : public CodecOf<RawCodec, RawParameters, Codec> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 1,
      .name = "raw",
      .summary = "float32 as it is",
      .source = "the uncompressed baseline",
      .lossless = true,
      .carries_non_finite = true,
  };
  using CodecOf::CodecOf;

  static RawParameters parse(Parameters&) { return {}; }
  static Result<RawParameters> read(const WireCodec& wire, Dtype dtype) {
    GW_RETURN_IF_ERROR(check_no_wire_parameters(kInfo, wire));
    return RawParameters{.dtype = dtype};
  }

  WireCodec wire() const noexcept override { return {.id = kInfo.id}; }
  uint64_t max_payload_size(uint64_t n) const noexcept override { return n * sizeof(float); }

  Status check_size(uint64_t n, uint64_t size) const override {
    return check_payload_size(kInfo, n, size_of(parameters().dtype), size);
  }

 protected:
  std::string parameter_text() const override { return {}; }

  Result<uint64_t> encode_values(const Input& input, const Measurement&, const DrawContext&,
                                 std::span<std::byte> payload, Execution& execution,
                                 std::span<float> decoded) const override {
    const uint64_t size = input.size() * size_of(input.x().dtype());
    std::memcpy(payload.data(), input.x().data(), size);
    if (!decoded.empty() && input.x().data() != decoded.data()) {
      GW_RETURN_IF_ERROR(
          decode_values(payload.first(size), decoded, DecodeMode::kStore, execution, {}));
    }
    return size;
  }

  Status decode_values(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                       Execution& execution, const AfterChunk& after) const override {
    const uint64_t size = size_of(parameters().dtype);
    const uint64_t chunk = after ? kChunkValues : out.size();
    for (uint64_t begin = 0; begin < out.size(); begin += chunk) {
      const uint64_t n = std::min(chunk, out.size() - begin);
      decode_part(payload.subspan(begin * size, n * size), out.subspan(begin, n), mode,
                  execution.kernels());
      if (after) after(begin, n);
    }
    return {};
  }

 private:
  void decode_part(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                   const Kernels& kernels) const {
    const auto* halves = reinterpret_cast<const uint16_t*>(payload.data());
    if (parameters().dtype == Dtype::kBfloat16) {
      kernels.widen_bf16(halves, out.size(), out.data(), mode);
    } else if (parameters().dtype == Dtype::kFloat16) {
      kernels.widen_f16(halves, out.size(), out.data(), mode);
    } else if (mode == DecodeMode::kStore) {
      std::memcpy(out.data(), payload.data(), payload.size());
    } else {
      const auto* values = reinterpret_cast<const float*>(payload.data());
      kernels.sum(out.data(), values, out.size(), out.data());
    }
  }
};

}  // namespace

const CodecEntry codec_entries::raw = entry<RawCodec>();

}  // namespace gradwire
