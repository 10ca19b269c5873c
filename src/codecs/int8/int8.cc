#include "codecs/int8/int8.h"

#include <string>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/chunks.h"
#include "codecs/input.h"
#include "codecs/registry.h"
#include "codecs/scales.h"
#include "stages/int8.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"bucket", "whole", "1 to 4294967295",
     "values that share a scale; by default the whole segment has one"},
};

constexpr CodecInfo kInfo = {
    .id = 4,
    .name = "int8",
    .summary = "255 levels up to the largest magnitude, rounded half to even",
    .source = "3LC (Lim, Andersen, Kaminsky; SysML 2019), section 4.2, \"8-bit int\"",
    .error_feedback = true,
    .lossless = false,
    .parameters = kParameters,
};

class Int8Codec final : public Codec {
 public:
  Int8Codec(uint32_t bucket, ResidualType residual_type) : Codec(residual_type), bucket_(bucket) {}

  const CodecInfo& info() const noexcept override { return kInfo; }
  Int8Parameters parameters() const { return {.bucket = bucket_}; }
  WireCodec wire() const noexcept override { return {.id = kInfo.id, .param_b = bucket_}; }
  uint64_t max_payload_size(uint64_t n) const noexcept override { return shape(n).max_size(); }

  Status check_size(uint64_t n, uint64_t size) const override {
    const ChunkShape shape = this->shape(n);
    return check_chunks_size(kInfo.name, shape, shape.max_size(), size);
  }

  Result<uint64_t> encode(const InputView& x, const ResidualView& residual, const DrawContext&,
                          std::span<std::byte> payload, Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    GW_RETURN_IF_ERROR(check_residual_size(kInfo, x.size(), residual));
    if (x.empty()) return 0;
    const Buckets buckets(x.size(), bucket_);
    const Input input(x, residual, execution.kernels());
    const uint32_t largest =
        for_each_absmax(input, buckets, execution, [&](uint64_t bucket, uint32_t magnitude) {
          store_le_f32(payload.data() + bucket * sizeof(float), int8_unit(magnitude));
        });
    if (largest >= kNonFiniteBits) return check_finite(kInfo, x, residual);
    // Where all units are 0, nothing is sent but the header; the residual is b all the same.
    const bool anything = int8_unit(largest) != 0.0f;
    if (!anything && !input.keeps_residual()) return 0;
    const ChunkShape shape = this->shape(x.size());
    const uint64_t size =
        encode_chunks(shape, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
          encode_chunk(input, buckets, shape, chunk, payload.data(),
                       reinterpret_cast<int8_t*>(slot), execution.kernels());
          return shape.room(chunk);
        });
    return anything ? size : 0;
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_size(out.size(), payload.size()));
    if (payload.empty()) return decode_zeros(out, mode);
    const Buckets buckets(out.size(), bucket_);
    GW_RETURN_IF_ERROR(
        check_scales(kInfo.name, payload.data(), buckets.count, kLargestInt8UnitBits));
    const Kernels& kernels = execution.kernels();
    const auto dequantize =
        mode == DecodeMode::kStore ? kernels.dequantize_int8 : kernels.dequantize_int8_add;
    const ChunkShape shape = this->shape(out.size());
    return decode_chunks(
        shape, payload, kInfo.name, execution, [&](uint64_t chunk, std::span<const uint8_t> bytes) {
          const auto* q = reinterpret_cast<const int8_t*>(bytes.data());
          const uint64_t first = shape.begin(chunk);
          bool valid = true;
          buckets.for_each_piece(
              first, first + shape.values(chunk), [&](uint64_t bucket, uint64_t begin, uint64_t n) {
                valid &= dequantize(q + (begin - first), n, unit_of(payload.data(), bucket),
                                    out.data() + begin);
              });
          return valid;
        });
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_bucket(text, bucket_, 0);
    return text;
  }

 private:
  [[nodiscard]] ChunkShape shape(uint64_t n) const {
    return {n, Buckets(n, bucket_).count * sizeof(float), ChunkShape::Sizes::kFixed,
            [](uint64_t values) { return values; }};
  }

  static float unit_of(const std::byte* scales, uint64_t bucket) {
    return load_le_f32(scales + bucket * sizeof(float));
  }

  static void encode_chunk(const Input& input, const Buckets& buckets, const ChunkShape& shape,
                           uint64_t chunk, const std::byte* scales, int8_t* out,
                           const Kernels& kernels) {
    const uint64_t chunk_begin = shape.begin(chunk);
    buckets.for_each_piece(chunk_begin, chunk_begin + shape.values(chunk),
                           [&](uint64_t bucket, uint64_t begin, uint64_t values) {
                             const float unit = unit_of(scales, bucket);
                             int8_t* q = out + (begin - chunk_begin);
                             input.with_residual(
                                 begin, values,
                                 [&](uint64_t first, uint64_t n, const float* x) {
                                   kernels.quantize_int8(x, n, unit, q + first);
                                 },
                                 [&](uint64_t first, uint64_t n, const float* x, float* r) {
                                   kernels.quantize_int8_f32(x, r, n, unit, q + first);
                                 },
                                 [&](uint64_t first, uint64_t n, const float* x, uint16_t* r) {
                                   kernels.quantize_int8_bf16(x, r, n, unit, q + first);
                                 });
                           });
  }

  uint32_t bucket_;  // values that share a scale; 0: the whole segment
};

}  // namespace

std::optional<Int8Parameters> int8_parameters(const Codec& codec) {
  const auto* int8 = dynamic_cast<const Int8Codec*>(&codec);
  return int8 == nullptr ? std::nullopt : std::optional(int8->parameters());
}

const CodecEntry codec_entries::int8 = {
    .info = &kInfo,
    .create = [](const Parameters& given,
                 ResidualType residual_type) -> Result<std::shared_ptr<const Codec>> {
      Result<uint32_t> bucket = given.bucket(1, 0);
      if (!bucket.ok()) return bucket.status();
      return std::shared_ptr<const Codec>(
          std::make_shared<Int8Codec>(bucket.value(), residual_type));
    },
    .from_wire = [](const WireCodec& wire, Dtype) -> Result<std::shared_ptr<const Codec>> {
      GW_RETURN_IF_ERROR(check_wire_bits(kInfo, wire.param_a, 0));
      return std::shared_ptr<const Codec>(
          std::make_shared<Int8Codec>(wire.param_b, ResidualType::kFloat32));
    },
};

}  // namespace gradwire
