#include "codecs/topk/topk.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/chunks.h"
#include "codecs/input.h"
#include "codecs/registry.h"
#include "codecs/scales.h"
#include "codecs/threshold.h"
#include "stages/element.h"
#include "stages/kernels.h"
#include "stages/trit_bits.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"ratio", "0.05", "[0.0001, 1)", "share of the values that is sent, about: the largest ones"},
    {"values", "f32", "f32|bf16", "how they are sent"},
    {"index", "bitmap", "bitmap|rice",
     "where they stand: a bit for each value, or gaps in Golomb-Rice code, smaller below a half"},
};

constexpr CodecInfo kInfo = {
    .id = 6,
    .name = "topk",
    .summary = "the largest values alone, and where they stand",
    .source = "3LC (Lim, Andersen, Kaminsky; SysML 2019), section 4.2: 25 %, 5 % sparsification",
    .error_feedback = true,
    .lossless = false,
    .parameters = kParameters,
};

// param_a: bit 0 the type of the values, bit 1 the coder of the index.
constexpr int kIndexShift = 1;
constexpr uint16_t kKnownBits = 3;

constexpr float kLeastRatio = 0.0001f;
constexpr uint64_t kChunkWords = kChunkValues / 64;
static_assert(Input::kPartValues % 64 == 0);

uint64_t map_size(uint64_t values) { return (values + 7) / 8; }

// Takes the n <= kPartValues values from `begin` on that reach the threshold out of the input. In
// the residual the others are left.
uint64_t take_large(const Input& input, uint64_t begin, uint64_t n, float threshold, uint64_t* mask,
                    float* taken) {
  const Kernels& kernels = input.kernels();
  uint64_t count = 0;
  input.with_residual(
      begin, n,
      [&](uint64_t, uint64_t, const float* x) {
        count = kernels.take_large(x, n, threshold, mask, taken);
      },
      [&](uint64_t, uint64_t, const float* x, float* r) {
        count = kernels.take_large_f32(x, r, n, threshold, mask, taken);
      },
      [&](uint64_t, uint64_t, const float* x, uint16_t* r) {
        count = kernels.take_large_bf16(x, r, n, threshold, mask, taken);
      });
  return count;
}

class TopkCodec final : public Codec {
 public:
  TopkCodec(TopkParameters parameters, ResidualType residual_type)
      : Codec(residual_type), parameters_(parameters) {}

  const CodecInfo& info() const noexcept override { return kInfo; }
  [[nodiscard]] const TopkParameters& parameters() const { return parameters_; }

  WireCodec wire() const noexcept override {
    return {
        .id = kInfo.id,
        .param_a = static_cast<uint16_t>(static_cast<uint16_t>(parameters_.values) |
                                         static_cast<uint16_t>(parameters_.index) << kIndexShift),
        .param_b = bits_of(parameters_.ratio)};
  }

  uint64_t max_payload_size(uint64_t n) const noexcept override { return shape(n).max_size(); }

  Status check_size(uint64_t n, uint64_t size) const override {
    const ChunkShape shape = this->shape(n);
    const uint64_t indices = shape.size_with(
        [this](uint64_t values) { return is_rice() ? kIndexSizeBytes : map_size(values); });
    return check_chunks_size(kInfo.name, shape, indices + 1, size);
  }

  Result<uint64_t> encode(const InputView& x, const ResidualView& residual, const DrawContext&,
                          std::span<std::byte> payload, Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    GW_RETURN_IF_ERROR(check_residual_size(kInfo, x.size(), residual));
    if (x.empty()) return 0;
    const Input input(x, residual, execution.kernels());
    const uint32_t largest =
        for_each_absmax(input, Buckets(x.size(), 0), execution, [](uint64_t, uint32_t) {});
    const uint32_t limit =
        parameters_.values == SentAs::kBfloat16 ? kRoundsToInfinity : kNonFiniteBits;
    if (largest >= limit) return check_finite(kInfo, x, residual, limit);
    const float threshold = sample_threshold(input, x.size(), parameters_.ratio);
    const ChunkShape shape = this->shape(x.size());
    const uint64_t size =
        encode_chunks(shape, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
          return encode_chunk(input, shape.begin(chunk), shape.values(chunk), threshold, slot,
                              execution.kernels());
        });
    return largest == 0 ? 0 : size;
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_size(out.size(), payload.size()));
    if (payload.empty()) return decode_zeros(out, mode);
    const ChunkShape shape = this->shape(out.size());
    return decode_chunks(
        shape, payload, kInfo.name, execution, [&](uint64_t chunk, std::span<const uint8_t> bytes) {
          return decode_chunk(bytes, out.subspan(shape.begin(chunk), shape.values(chunk)), mode,
                              execution.kernels());
        });
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_parameter(text, "ratio", format_number(parameters_.ratio));
    if (parameters_.values == SentAs::kBfloat16) append_parameter(text, "values", "bf16");
    if (is_rice()) append_parameter(text, "index", "rice");
    return text;
  }

 private:
  [[nodiscard]] uint64_t width() const {
    return parameters_.values == SentAs::kFloat32 ? sizeof(float) : sizeof(uint16_t);
  }

  [[nodiscard]] bool is_rice() const { return parameters_.index == IndexCoder::kRice; }

  [[nodiscard]] uint64_t index_room(uint64_t values) const {
    return is_rice() ? kIndexSizeBytes + packed_size(values) : map_size(values);
  }

  // A chunk is its index and the values behind it.
  [[nodiscard]] ChunkShape shape(uint64_t n) const {
    return {n, 0, ChunkShape::Sizes::kVarying,
            [this](uint64_t values) { return index_room(values) + values * width(); }};
  }

  // Writes which of n values are sent; returns the bytes that it takes.
  uint64_t write_index(const uint64_t* mask, uint64_t n, uint8_t* out,
                       const Kernels& kernels) const {
    if (!is_rice()) {
      std::memcpy(out, mask, map_size(n));
      return map_size(n);
    }
    constexpr uint64_t kNone[kChunkWords] = {};
    const uint64_t size = kernels.rice_encode(mask, kNone, n, out + kIndexSizeBytes);
    store_le(reinterpret_cast<std::byte*>(out), static_cast<uint16_t>(size));
    return kIndexSizeBytes + size;
  }

  // The way back; returns the bytes that it took, or 0 where they are not valid.
  uint64_t read_index(std::span<const uint8_t> bytes, uint64_t n, uint64_t* mask,
                      const Kernels& kernels) const {
    if (is_rice()) {
      if (bytes.size() < kIndexSizeBytes) return 0;
      const auto size = load_le<uint16_t>(reinterpret_cast<const std::byte*>(bytes.data()));
      if (size > bytes.size() - kIndexSizeBytes) return 0;
      uint64_t minus[kChunkWords];
      const auto* codes = bytes.data() + kIndexSizeBytes;
      if (!kernels.rice_decode(codes, size, n, mask, minus)) return 0;
      const bool plus_alone =
          std::all_of(minus, minus + trit_words(n), [](uint64_t word) { return word == 0; });
      return plus_alone ? kIndexSizeBytes + size : 0;
    }
    if (bytes.size() < map_size(n)) return 0;
    mask[(n - 1) / 64] = 0;
    std::memcpy(mask, bytes.data(), map_size(n));
    const bool padded = n % 64 != 0;
    return padded && (mask[n / 64] >> n % 64) != 0 ? 0 : map_size(n);
  }

  [[nodiscard]] uint64_t encode_chunk(const Input& input, uint64_t begin, uint64_t n,
                                      float threshold, uint8_t* slot,
                                      const Kernels& kernels) const {
    uint64_t mask[kChunkWords];
    uint8_t* const first_value = slot + index_room(n);
    uint8_t* end = first_value;
    float sent[Input::kPartValues];
    for (uint64_t first = 0; first < n; first += Input::kPartValues) {
      const uint64_t values = std::min(Input::kPartValues, n - first);
      uint64_t* words = mask + first / 64;
      const uint64_t count = take_large(input, begin + first, values, threshold, words, sent);
      if (parameters_.values == SentAs::kFloat32) {
        std::copy_n(reinterpret_cast<const uint8_t*>(sent), count * sizeof(float), end);
      } else {
        const auto* narrow = reinterpret_cast<const uint16_t*>(end);
        kernels.narrow_bf16(sent, count, reinterpret_cast<uint16_t*>(end));
        const float* value = sent;
        for_each_set_bit(words, values, [&](uint64_t i) {
          input.store(begin + first + i, *value++ - widen_bf16(load_unaligned(narrow++)));
        });
      }
      end += count * width();
    }
    const uint64_t index = write_index(mask, n, slot, kernels);
    const auto values = static_cast<uint64_t>(end - first_value);
    if (slot + index != first_value) std::memmove(slot + index, first_value, values);
    return index + values;
  }

  [[nodiscard]] bool decode_chunk(std::span<const uint8_t> bytes, std::span<float> out,
                                  DecodeMode mode, const Kernels& kernels) const {
    uint64_t mask[kChunkWords];
    const uint64_t index = read_index(bytes, out.size(), mask, kernels);
    if (index == 0) return false;
    uint64_t count = 0;
    for (uint64_t word = 0; word * 64 < out.size(); ++word) {
      count += static_cast<uint64_t>(std::popcount(mask[word]));
    }
    if (bytes.size() != index + count * width()) return false;
    const uint8_t* from = bytes.data() + index;
    if (mode == DecodeMode::kStore) std::fill(out.begin(), out.end(), 0.0f);
    if (parameters_.values == SentAs::kFloat32) {
      const auto* value = reinterpret_cast<const float*>(from);
      for_each_set_bit(mask, out.size(), [&](uint64_t i) { out[i] += load_unaligned(value++); });
    } else {
      const auto* value = reinterpret_cast<const uint16_t*>(from);
      for_each_set_bit(mask, out.size(),
                       [&](uint64_t i) { out[i] += widen_bf16(load_unaligned(value++)); });
    }
    return true;
  }

  TopkParameters parameters_;
};

Result<std::shared_ptr<const Codec>> create(const Parameters& given, ResidualType residual_type) {
  TopkParameters parameters;
  Result<float> ratio = given.number("ratio", kLeastRatio, 1.0f, parameters.ratio);
  if (!ratio.ok()) return ratio.status();
  Result<size_t> values = given.choice("values", {"f32", "bf16"}, 0);
  if (!values.ok()) return values.status();
  Result<size_t> index = given.choice("index", {"bitmap", "rice"}, 0);
  if (!index.ok()) return index.status();
  parameters.ratio = ratio.value();
  parameters.values = static_cast<SentAs>(values.value());
  parameters.index = static_cast<IndexCoder>(index.value());
  return std::shared_ptr<const Codec>(std::make_shared<TopkCodec>(parameters, residual_type));
}

Result<std::shared_ptr<const Codec>> from_wire(const WireCodec& wire, Dtype) {
  GW_RETURN_IF_ERROR(check_wire_bits(kInfo, wire.param_a, kKnownBits));
  TopkParameters parameters;
  const float ratio = float_of(wire.param_b);
  if (ratio >= kLeastRatio && ratio < 1.0f) parameters.ratio = ratio;
  parameters.values = static_cast<SentAs>(wire.param_a & 1);
  parameters.index = static_cast<IndexCoder>(wire.param_a >> kIndexShift);
  return std::shared_ptr<const Codec>(
      std::make_shared<TopkCodec>(parameters, ResidualType::kFloat32));
}

}  // namespace

std::optional<TopkParameters> topk_parameters(const Codec& codec) {
  const auto* topk = dynamic_cast<const TopkCodec*>(&codec);
  return topk == nullptr ? std::nullopt : std::optional(topk->parameters());
}

const CodecEntry codec_entries::topk = {.info = &kInfo, .create = create, .from_wire = from_wire};

}  // namespace gradwire
