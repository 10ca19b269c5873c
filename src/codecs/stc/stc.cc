#include "codecs/stc/stc.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/input.h"
#include "codecs/registry.h"
#include "codecs/scales.h"
#include "codecs/ternary.h"
#include "codecs/ternary_parameters.h"
#include "codecs/threshold.h"
#include "stages/element.h"
#include "stages/kernels.h"
#include "stages/threshold.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"density", "0.01", "[0.0001, 1)",
     "share of the values that is sent, about: the largest ones, all of the same magnitude"},
    {"coder", "rice", "rice|zre|none",
     "gaps in Golomb-Rice code, or five values to a byte with zero-run coding, or without"},
};

constexpr CodecInfo kInfo = {
    .id = 19,
    .name = "stc",
    .summary = "the largest values, each as its sign times their mean magnitude",
    .source =
        "Sparse ternary compression (Sattler, Wiedemann, Mueller, Samek; IEEE TNNLS 2019), "
        "sections IV, V",
    .error_feedback = true,
    .lossless = false,
    .parameters = kParameters,
};

constexpr float kLeastDensity = 0.0001f;

// Mean magnitude of the values that reach the threshold: of each chunk's list of them the sum that
// stages/element.h defines, then the chunks' sums in order.
float mean_magnitude(const Input& input, const ChunkShape& shape, float threshold,
                     Execution& execution) {
  struct Part {
    double sum;
    uint64_t count;
  };
  std::vector<Part> parts(shape.chunks);
  const Kernels& kernels = execution.kernels();
  execution.for_each(shape.chunks, [&](size_t chunk) {
    float reached[kChunkValues];
    uint64_t count = 0;
    input.for_each_part(shape.begin(chunk), shape.values(chunk),
                        [&](uint64_t, uint64_t n, const float* b) {
                          uint64_t mask[Input::kPartValues / kWordBits];
                          kernels.threshold_bits(b, n, threshold, mask);
                          count += kernels.compress(b, mask, n, reached + count);
                        });
    for (uint64_t i = 0; i < count; ++i) reached[i] = std::abs(reached[i]);
    parts[chunk] = {kernels.moments(reached, count).sum, count};
  });
  Part total = {0, 0};
  for (const Part& part : parts) {
    total.sum += part.sum;
    total.count += part.count;
  }
  return mean_reached(total.sum, total.count);
}

class StcCodec final : public Codec {
 public:
  StcCodec(StcParameters parameters, ResidualType residual_type)
      : Codec(residual_type), parameters_(parameters) {}

  const CodecInfo& info() const noexcept override { return kInfo; }
  const StcParameters& parameters() const { return parameters_; }

  WireCodec wire() const noexcept override {
    return {.id = kInfo.id,
            .param_a = static_cast<uint16_t>(parameters_.coder),
            .param_b = bits_of(parameters_.density)};
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
    const Input input(x, residual, execution.kernels());
    const TernaryShape shape = this->shape(x.size());
    const uint32_t largest =
        for_each_absmax(input, shape.buckets, execution, [](uint64_t, uint32_t) {});
    if (largest >= kNonFiniteBits) return check_finite(kInfo, x, residual);
    // Nothing is sent but the header. A residual that the input has just cancelled is now 0.
    if (largest == 0 && !input.keeps_residual()) return 0;
    const float threshold = sample_threshold(input, x.size(), parameters_.density);
    const float mean = mean_magnitude(input, shape.chunks, threshold, execution);
    store_le_f32(payload.data(), mean);
    const uint64_t size =
        encode_chunks(shape.chunks, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
          TritBits trits;
          find_trits(input, shape.chunks, chunk, threshold, mean, trits);
          return code_trits(parameters_.coder, trits, shape.chunks.values(chunk), slot,
                            execution.kernels());
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
    append_parameter(text, "density", format_number(parameters_.density));
    append_coder(text, parameters_.coder, TernaryCoder::kRice);
    return text;
  }

 private:
  // One scale for all.
  [[nodiscard]] TernaryShape shape(uint64_t n) const { return {n, parameters_.coder, 0}; }

  // The bits of one chunk's trits; residuals become what is left of the values.
  static void find_trits(const Input& input, const ChunkShape& shape, uint64_t chunk,
                         float threshold, float mean, TritBits& trits) {
    float buffer[Input::kPartValues];
    const uint64_t n = shape.values(chunk);
    for (uint64_t first = 0; first < n; first += Input::kPartValues) {
      const uint64_t values = std::min(Input::kPartValues, n - first);
      const uint64_t begin = shape.begin(chunk) + first;
      const float* b = input.load(begin, values, buffer);
      uint64_t* plus = trits.plus + first / kWordBits;
      uint64_t* minus = trits.minus + first / kWordBits;
      std::fill_n(minus, trit_words(values), 0);
      input.kernels().threshold_bits(b, values, threshold, plus);
      for_each_set_bit(plus, values, [&](uint64_t i) {
        const uint64_t bit = uint64_t{b[i] < 0.0f} << i % kWordBits;
        minus[i / kWordBits] |= bit;
        plus[i / kWordBits] &= ~bit;
        // Without a residual b may be the caller's, and is left alone.
        if (input.keeps_residual()) buffer[i] = ternary_residual(b[i], b[i] < 0.0f ? -1 : 1, mean);
      });
      if (input.keeps_residual()) input.store(begin, values, buffer);
    }
  }

  StcParameters parameters_;
};

Result<std::shared_ptr<const Codec>> create(const Parameters& given, ResidualType residual_type) {
  StcParameters parameters;
  Result<float> density = given.number("density", kLeastDensity, 1.0f, parameters.density);
  if (!density.ok()) return density.status();
  Result<TernaryCoder> coder = parse_coder(given, parameters.coder);
  if (!coder.ok()) return coder.status();
  parameters.density = density.value();
  parameters.coder = coder.value();
  return std::shared_ptr<const Codec>(std::make_shared<StcCodec>(parameters, residual_type));
}

Result<std::shared_ptr<const Codec>> from_wire(const WireCodec& wire, Dtype) {
  GW_RETURN_IF_ERROR(
      check_wire_bits(kInfo, wire.param_a, static_cast<uint32_t>(TernaryCoder::kRice)));
  StcParameters parameters;
  const float density = float_of(wire.param_b);
  if (density >= kLeastDensity && density < 1.0f) parameters.density = density;
  parameters.coder = static_cast<TernaryCoder>(wire.param_a);
  return std::shared_ptr<const Codec>(
      std::make_shared<StcCodec>(parameters, ResidualType::kFloat32));
}

}  // namespace

std::optional<StcParameters> stc_parameters(const Codec& codec) {
  const auto* stc = dynamic_cast<const StcCodec*>(&codec);
  return stc == nullptr ? std::nullopt : std::optional(stc->parameters());
}

const CodecEntry codec_entries::stc = {.info = &kInfo, .create = create, .from_wire = from_wire};

}  // namespace gradwire
