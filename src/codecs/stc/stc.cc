#include "codecs/stc/stc.h"

#include <algorithm>
#include <cmath>

#include "codecs/checks.h"
#include "codecs/reached_trits.h"
#include "codecs/ternary.h"
#include "codecs/ternary_parameters.h"
#include "codecs/threshold.h"
#include "stages/element/float_bits.h"
#include "stages/kernels.h"
#include "stages/threshold/reach.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"density", "0.01", "[0.0001, 1)",
     "share of the values that is sent, about: the largest ones, all of the same magnitude"},
    {"coder", "rice", "rice|zre|none",
     "gaps in Golomb-Rice code, or five values to a byte with zero-run coding, or without"},
};

constexpr float kLeastDensity = 0.0001f;

class StcCodec final : public TernaryCodec<StcCodec, StcParameters> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 19,
      .name = "stc",
      .summary = "the largest values, each as its sign times their mean magnitude",
      .source =
          "Sparse ternary compression (Sattler, Wiedemann, Mueller, Samek; IEEE TNNLS 2019), "
          "sections IV, V",
      .error_feedback = true,
      .parameters = kParameters,
  };
  using TernaryCodec::TernaryCodec;

  static StcParameters parse(Parameters& given) {
    const StcParameters defaults;
    return {.density = given.number("density", kLeastDensity, 1.0f, defaults.density),
            .coder = given.choice("coder", kTernaryCoders, defaults.coder)};
  }

  static Result<StcParameters> read(const WireCodec& wire, Dtype) {
    GW_RETURN_IF_ERROR(
        check_wire_bits(kInfo, wire.param_a, static_cast<uint32_t>(TernaryCoder::kRice)));
    StcParameters parameters;
    const float density = float_of(wire.param_b);
    if (density >= kLeastDensity && density < 1.0f) parameters.density = density;
    parameters.coder = static_cast<TernaryCoder>(wire.param_a);
    return parameters;
  }

  WireCodec wire() const noexcept override {
    return {.id = kInfo.id,
            .param_a = static_cast<uint16_t>(parameters().coder),
            .param_b = bits_of(parameters().density)};
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_parameter(text, "density", format_number(parameters().density));
    append_choice(text, "coder", kTernaryCoders, parameters().coder, StcParameters().coder);
    return text;
  }

  // sums[0] is the threshold, sums[1] the mean magnitude of the values that reach it.
  Result<Measurement> measure_values(const Input& input, std::span<const Measurement> chunks,
                                     Execution& execution) const override {
    Result<Measurement> found = TernaryCodec::measure_values(input, chunks, execution);
    if (!found.ok()) return found;
    const float threshold = sample_threshold(input, parameters().density);
    const auto sum = [threshold](const Input& x, uint64_t begin, uint64_t n) {
      return sum_reached(x, begin, n, threshold);
    };
    const Measurement reached = measure_chunks(input, execution, sum);
    found.value().sums[0] = threshold;
    found.value().sums[1] = mean_reached(reached.sums[0], reached.count);
    return found;
  }

  void put_head(const Measurement& group, uint64_t, const Encoding&,
                std::byte* head) const override {
    store_le_f32(head, static_cast<float>(group.sums[1]));
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    TritBits trits;
    const auto threshold = static_cast<float>(encoding.measured.sums[0]);
    find_reached_trits(encoding, chunk, threshold, encoding.scale(0), trits,
                       [](float, uint64_t) { return true; });
    return code_trits(parameters().coder, trits, encoding.shape.chunks.values(chunk), slot,
                      encoding.kernels());
  }

 private:
  // The sum, as stages/magnitude/moments.h defines it, of the magnitudes that reach the threshold.
  static Measurement sum_reached(const Input& input, uint64_t begin, uint64_t n, float threshold) {
    const Kernels& kernels = input.kernels();
    float reached[kChunkValues];
    uint64_t count = 0;
    input.for_each_part(begin, n, [&](uint64_t, uint64_t values, const float* b) {
      uint64_t mask[Input::kPartValues / kWordBits];
      kernels.threshold_bits(b, values, threshold, mask);
      for_each_set_bit(mask, values, [&](uint64_t i) { reached[count++] = std::abs(b[i]); });
    });
    return {.count = count, .sums = {kernels.moments(reached, count).sum}};
  }
};

}  // namespace

const CodecEntry codec_entries::stc = entry<StcCodec>();

}  // namespace gradwire
