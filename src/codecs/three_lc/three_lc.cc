#include "codecs/three_lc/three_lc.h"

#include <algorithm>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/input.h"
#include "codecs/registry.h"
#include "codecs/ternary.h"
#include "codecs/ternary_parameters.h"
#include "stages/element.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"s", "1", "[1, 2)", "sparsity multiplier: larger sends fewer values, each standing for more"},
    {"coder", "zre", "zre|rice|none",
     "zero-run coding of the packed trits; gaps in Golomb-Rice code (smaller); or none"},
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

constexpr float kSparsityUnits = 16384.0f;  // in param_a, of s - 1

// Quantizes and packs n values from `begin` on; their residuals become what is left of them.
void pack(const Kernels& kernels, const float* x, const ResidualView& residual, uint64_t begin,
          uint64_t n, float m, uint8_t* packed) {
  switch (residual.type()) {
    case ResidualType::kNone:
      return kernels.ternary_pack(x, n, m, packed);
    case ResidualType::kFloat32:
      return kernels.ternary_pack_f32(x, residual.f32() + begin, n, m, packed);
    case ResidualType::kBfloat16:
      return kernels.ternary_pack_bf16(x, residual.bf16() + begin, n, m, packed);
  }
}

// The same with zero-run coding behind it. Returns the number of codes.
uint64_t pack_zero_runs(const Kernels& kernels, const float* x, const ResidualView& residual,
                        uint64_t begin, uint64_t n, float m, uint8_t* codes) {
  switch (residual.type()) {
    case ResidualType::kNone:
      return kernels.ternary_encode(x, n, m, codes);
    case ResidualType::kFloat32:
      return kernels.ternary_encode_f32(x, residual.f32() + begin, n, m, codes);
    case ResidualType::kBfloat16:
      return kernels.ternary_encode_bf16(x, residual.bf16() + begin, n, m, codes);
  }
  return 0;
}

// Quantizes to bits.
void to_bits(const Kernels& kernels, const float* x, const ResidualView& residual, uint64_t begin,
             uint64_t n, float m, TritBits& trits) {
  switch (residual.type()) {
    case ResidualType::kNone:
      return kernels.trit_bits(x, n, m, trits.plus, trits.minus);
    case ResidualType::kFloat32:
      return kernels.trit_bits_f32(x, residual.f32() + begin, n, m, trits.plus, trits.minus);
    case ResidualType::kBfloat16:
      return kernels.trit_bits_bf16(x, residual.bf16() + begin, n, m, trits.plus, trits.minus);
  }
}

// Quantizes n values from `first` on and codes the gaps between non-zeros.
uint64_t encode_rice(const TernaryShape& shape, const float* x, const ResidualView& residual,
                     uint64_t first, uint64_t n, const std::byte* scales, uint8_t* slot,
                     const Kernels& kernels) {
  TritBits trits;
  TritBits piece;
  shape.buckets.for_each_piece(
      first, first + n, [&](uint64_t bucket, uint64_t begin, uint64_t count) {
        const float m = load_le_f32(scales + bucket * sizeof(float));
        const bool whole = count == n;
        to_bits(kernels, x + (begin - first), residual, begin, count, m, whole ? trits : piece);
        if (!whole) trits.append(begin - first, piece, count);
      });
  return kernels.rice_encode(trits.plus, trits.minus, n, slot);
}

// Quantizes, packs and codes one chunk into `slot`, which has room for its packed bytes.
uint64_t encode_chunk(const TernaryShape& shape, uint64_t chunk, const InputView& x,
                      const ResidualView& residual, const std::byte* scales, uint8_t* slot,
                      const Kernels& kernels) {
  const uint64_t first = shape.chunks.begin(chunk);
  const uint64_t n = shape.chunks.values(chunk);
  float widened[kChunkValues];
  const float* values = Input(x, {}, kernels).load(first, n, widened);
  if (shape.coder == TernaryCoder::kRice) {
    return encode_rice(shape, values, residual, first, n, scales, slot, kernels);
  }
  if (shape.coder == TernaryCoder::kZeroRun && shape.buckets.count == 1) {
    return pack_zero_runs(kernels, values, residual, first, n, load_le_f32(scales), slot);
  }
  alignas(64) uint8_t packed[kChunkValues / kTritsPerByte];
  uint8_t* destination = shape.coder == TernaryCoder::kNone ? slot : packed;
  shape.buckets.for_each_piece(first, first + n,
                               [&](uint64_t bucket, uint64_t begin, uint64_t count) {
                                 pack(kernels, values + (begin - first), residual, begin, count,
                                      load_le_f32(scales + bucket * sizeof(float)),
                                      destination + (begin - first) / kTritsPerByte);
                               });
  if (shape.coder == TernaryCoder::kNone) return packed_size(n);
  return kernels.zero_run_encode(packed, packed_size(n), slot);
}

class ThreeLcCodec final : public Codec {
 public:
  ThreeLcCodec(ThreeLcParameters parameters, ResidualType residual_type)
      : Codec(residual_type), parameters_(parameters) {}

  const CodecInfo& info() const noexcept override { return kInfo; }
  [[nodiscard]] const ThreeLcParameters& parameters() const { return parameters_; }

  WireCodec wire() const noexcept override {
    return {.id = kInfo.id,
            .param_a = tell_number(parameters_.coder, parameters_.sparsity - 1.0f, kSparsityUnits),
            .param_b = parameters_.bucket};
  }

  uint64_t max_payload_size(uint64_t n) const noexcept override { return shape(n).max_size(); }

  Status check_size(uint64_t n, uint64_t size) const override {
    return check_ternary_size(shape(n), kInfo.name, size);
  }

  Result<uint64_t> encode(const InputView& x, const ResidualView& residual, const DrawContext&,
                          std::span<std::byte> payload, Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    GW_RETURN_IF_ERROR(check_residual_size(kInfo, x.size(), residual));
    if (x.empty()) return 0;
    const TernaryShape shape = this->shape(x.size());
    const uint32_t largest =
        for_each_absmax(Input(x, residual, execution.kernels()), shape.buckets, execution,
                        [&](uint64_t bucket, uint32_t magnitude) {
                          store_le_f32(payload.data() + bucket * sizeof(float),
                                       ternary_multiplier(magnitude, parameters_.sparsity));
                        });
    if (largest >= kNonFiniteBits) return check_finite(kInfo, x, residual);
    // m = 0: nothing is sent but the header. A residual that the input has just cancelled is now 0.
    if (largest == 0 && residual.type() == ResidualType::kNone) return 0;
    const uint64_t size =
        encode_chunks(shape.chunks, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
          return encode_chunk(shape, chunk, x, residual, payload.data(), slot, execution.kernels());
        });
    return largest == 0 ? 0 : size;
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    return decode_ternary(shape(out.size()), kInfo.name, payload, out, mode, execution);
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_parameter(text, "s", format_number(parameters_.sparsity));
    append_coder(text, parameters_.coder, TernaryCoder::kZeroRun);
    append_bucket(text, parameters_.bucket, 0);
    return text;
  }

 private:
  [[nodiscard]] TernaryShape shape(uint64_t n) const {
    return {n, parameters_.coder, parameters_.bucket};
  }

  ThreeLcParameters parameters_;
};

Result<std::shared_ptr<const Codec>> create(const Parameters& given, ResidualType residual_type) {
  ThreeLcParameters parameters;
  Result<float> sparsity = given.number("s", 1.0f, 2.0f, parameters.sparsity);
  if (!sparsity.ok()) return sparsity.status();
  Result<TernaryCoder> coder = parse_coder(given, parameters.coder);
  if (!coder.ok()) return coder.status();
  Result<uint32_t> bucket = given.bucket(kTritsPerByte, 0);
  if (!bucket.ok()) return bucket.status();
  parameters.sparsity = sparsity.value();
  parameters.coder = coder.value();
  parameters.bucket = bucket.value();
  return std::shared_ptr<const Codec>(std::make_shared<ThreeLcCodec>(parameters, residual_type));
}

Result<std::shared_ptr<const Codec>> from_wire(const WireCodec& wire, Dtype) {
  const TernaryCoder coder = told_coder(wire.param_a);
  if (coder == TernaryCoder::kTwoBit) {
    return Status(StatusCode::kReservedBits, "3lc: coder 3 is reserved");
  }
  GW_RETURN_IF_ERROR(check_wire_bucket(kInfo, wire, kTritsPerByte));
  const ThreeLcParameters parameters = {
      .sparsity = std::min(1.0f + told_number(wire.param_a, kSparsityUnits, 1e4f), 1.9999f),
      .coder = coder,
      .bucket = wire.param_b};
  return std::shared_ptr<const Codec>(
      std::make_shared<ThreeLcCodec>(parameters, ResidualType::kFloat32));
}

}  // namespace

std::optional<ThreeLcParameters> three_lc_parameters(const Codec& codec) {
  const auto* three_lc = dynamic_cast<const ThreeLcCodec*>(&codec);
  return three_lc == nullptr ? std::nullopt : std::optional(three_lc->parameters());
}

const CodecEntry codec_entries::three_lc = {
    .info = &kInfo, .create = create, .from_wire = from_wire};

}  // namespace gradwire
