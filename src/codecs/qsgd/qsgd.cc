#include "codecs/qsgd/qsgd.h"

#include <algorithm>
#include <cfloat>
#include <string>

#include "codecs/checks.h"
#include "codecs/draws.h"
#include "codecs/registry.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"bits", "4", "2 to 14", "bits of a level with coder=fixed: levels up to s = 2^(bits - 1) - 1"},
    {"levels", "by bits", "1 to 8191", "the largest level s, instead of bits"},
    {"bucket", "512", "multiple of 8", "values that share a scale"},
    {"norm", "max", "max|l2", "what the scale is made of: largest magnitude, or Euclidean norm"},
    {"coder", "fixed", "fixed|elias|elias-dense",
     "equal bits for each level, or Elias codes: of those that are not 0, or of all"},
};

// Bits of param_a (codecs/qsgd/spec.md).
constexpr int kLowBits = 7;  // of s
constexpr uint16_t kLowMask = 127;
constexpr int kCoderShift = 7;
constexpr uint16_t kCoderMask = 3;
constexpr int kNormShift = 9;
constexpr int kHighShift = 10;  // the bits of s above the low ones
constexpr std::string_view kBits[] = {"2", "3",  "4",  "5",  "6",  "7", "8",
                                      "9", "10", "11", "12", "13", "14"};
constexpr std::string_view kNorms[] = {"max", "l2"};
constexpr std::string_view kLevelCoders[] = {"fixed", "elias", "elias-dense"};
// A sum of squares adds the sums of parts of this many values (codecs/qsgd/spec.md).
constexpr uint64_t kSquaresPart = 4096;

class QsgdCodec final : public CodecOf<QsgdCodec, QsgdParameters, ChunkedCodec> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 24,
      .name = "qsgd",
      .summary = "levels between -norm and norm, drawn without bias; fixed bits or Elias codes",
      .source = "QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic; NIPS 2017), section 3",
      .draws = true,
      .parameters = kParameters,
  };
  using CodecOf::CodecOf;

  static QsgdParameters parse(Parameters& given) {
    const QsgdParameters defaults;
    const size_t bits = given.choice("bits", kBits, size_t{2});
    const uint32_t levels = given.count("levels", 1, kLargestLevel, 0);
    if (given.has("bits") && given.has("levels")) given.fail("give bits or levels, not both");
    return {.levels = levels > 0 ? static_cast<int32_t>(levels) : (1 << (bits + 1)) - 1,
            .coder = given.choice("coder", kLevelCoders, defaults.coder),
            .norm = given.choice("norm", kNorms, defaults.norm),
            .group_size = given.group_size(8, defaults.group_size)};
  }

  // With norm max every error is below norm / s, so from s = 2 on the residual stays below the
  // largest input. With norm l2 the squared error is at most (sqrt(n) / s - 1) |b|^2 for a group of
  // n > 4 s^2 values, and n / (4 s^2) |b|^2 for smaller groups: below |b|^2 if n < 4 s^2.
  static std::string why_no_feedback(const QsgdParameters& p) {
    if (p.levels == 1) return std::string(kNoFeedbackForDrawnTrits);
    const auto squared = static_cast<uint32_t>(4 * p.levels * p.levels);
    if (p.norm == Norm::kMax || p.group_size < squared) return {};
    return "with norm=l2 the error of " + std::to_string(p.group_size) +
           " values can exceed their norm, so what error feedback keeps would grow without bound; "
           "leave ef out, or take norm=max, or bucket=" +
           std::to_string((squared - 1) / 8 * 8) + " at most with s = " + std::to_string(p.levels) +
           " levels (less than 4 s^2 values)";
  }

  static Result<QsgdParameters> read(const WireCodec& wire, Dtype) {
    const int coder = wire.param_a >> kCoderShift & kCoderMask;
    const int32_t levels = (wire.param_a & kLowMask) | (wire.param_a >> kHighShift) << kLowBits;
    if (levels == 0 || coder == 3) {
      return Status(StatusCode::kReservedBits,
                    "qsgd: param_a " + std::to_string(wire.param_a) + " is reserved");
    }
    if (wire.param_b == 0) return Status(StatusCode::kReservedBits, "qsgd: a group has no values");
    GW_RETURN_IF_ERROR(check_wire_group_size(kInfo, wire, 8));
    return QsgdParameters{.levels = levels,
                          .coder = static_cast<LevelCoder>(coder),
                          .norm = static_cast<Norm>(wire.param_a >> kNormShift & 1),
                          .group_size = wire.param_b};
  }

  // From 4 bits on, a step of the levels is small beside the values that matter.
  bool is_coarse() const noexcept override { return parameters().levels < 7; }

  WireCodec wire() const noexcept override {
    const QsgdParameters& p = parameters();
    // The norm is stated for people who inspect frames; no decoder needs it.
    return {.id = kInfo.id,
            .param_a = static_cast<uint16_t>(
                (p.levels & kLowMask) | (p.levels >> kLowBits) << kHighShift |
                static_cast<int>(p.coder) << kCoderShift | static_cast<int>(p.norm) << kNormShift),
            .param_b = p.group_size};
  }

 protected:
  std::string parameter_text() const override {
    const QsgdParameters defaults;
    const int32_t s = parameters().levels;
    std::string text;
    if ((s & (s + 1)) != 0) {
      append_parameter(text, "levels", std::to_string(s));
    } else if (s != defaults.levels) {
      append_parameter(text, "bits", std::to_string(level_width(s)));
    }
    append_group_size(text, parameters().group_size, defaults.group_size);
    append_choice(text, "norm", kNorms, parameters().norm, defaults.norm);
    append_choice(text, "coder", kLevelCoders, parameters().coder, defaults.coder);
    return text;
  }

  ChunkedShape shape(uint64_t n) const override { return parameters().shape(n); }

  // A group's sum of squares isn't cut into chunks.
  bool measures_chunks(uint64_t n) const noexcept override {
    return parameters().norm == Norm::kMax && ChunkedCodec::measures_chunks(n);
  }

  Measurement measure_group(const Input& input, uint64_t begin, uint64_t n) const override {
    if (parameters().norm == Norm::kMax) return measure_absmax(input, begin, n);
    Measurement found;
    float buffer[kSquaresPart];
    for (uint64_t first = 0; first < n; first += kSquaresPart) {
      const uint64_t count = std::min(kSquaresPart, n - first);
      const float* b = input.load(begin + first, count, buffer);
      found.sums[0] += input.kernels().moments(b, count).squares;
    }
    return found;
  }

  // A group's head is its unit.
  void put_head(const Measurement& group, uint64_t, const Encoding&,
                std::byte* head) const override {
    const float norm =
        parameters().norm == Norm::kMax ? float_of(group.largest) : l2_norm_of(group.sums[0]);
    store_le_f32(head, level_unit(norm, parameters().levels));
  }

  // Each unit and s times it are finite.
  Status check_heads(const ChunkedShape& shape, const std::byte* heads) const override {
    const auto s = static_cast<float>(parameters().levels);
    uint32_t largest = std::min(bits_of(FLT_MAX / s) + 2, kNonFiniteBits - 1);
    while (float_of(largest) * s > FLT_MAX) --largest;
    return check_scales(kInfo.name, heads, shape.groups.count, largest);
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    return is_wide() ? encode_levels<int16_t>(encoding, chunk, slot)
                     : encode_levels<int8_t>(encoding, chunk, slot);
  }

  bool decode_chunk(const Decoding& decoding, uint64_t chunk, std::span<const uint8_t> bytes,
                    float* out) const override {
    return is_wide() ? decode_levels<int16_t>(decoding, chunk, bytes, out)
                     : decode_levels<int8_t>(decoding, chunk, bytes, out);
  }

 private:
  [[nodiscard]] bool is_wide() const { return parameters().levels > kLargestByteLevel; }

  template <typename Level>
  uint64_t encode_levels(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const {
    const Kernels& kernels = encoding.kernels();
    const DrawContext& draw = encoding.draw;
    const DrawStream stream = DrawStream::create(draw.seed, draw.stream, draw.step);
    const uint64_t begin = encoding.shape.chunks.begin(chunk);
    const uint64_t n = encoding.shape.chunks.values(chunk);
    alignas(64) Level levels[kChunkValues];
    const auto for_each_unit = [&](uint64_t first, uint64_t count, const auto& body) {
      encoding.shape.groups.for_each_piece(begin + first, begin + first + count,
                                           [&](uint64_t group, uint64_t from, uint64_t values) {
                                             body(encoding.scale(group), from - begin, values);
                                           });
    };
    const auto quantize = [&](float unit, const float* b, uint64_t values, const uint32_t* words,
                              Level* out) {
      if (unit == 0.0f) return void(std::fill_n(out, values, Level{0}));
      const LevelScale scale = level_scale(unit, parameters().levels);
      if constexpr (sizeof(Level) == 1) {
        kernels.quantize_levels(b, values, scale, words, out);
      } else {
        kernels.quantize_wide_levels(b, values, scale, words, out);
      }
    };
    encoding.input.encode_parts(
        begin, n,
        [&](uint64_t first, uint64_t count, const float* b) {
          for_each_drawn(stream, begin + first, count, kernels,
                         [&](uint64_t at, uint64_t drawn, const uint32_t* words) {
                           for_each_unit(first + at, drawn,
                                         [&](float unit, uint64_t from, uint64_t values) {
                                           quantize(unit, b + (from - first), values,
                                                    words + (from - first - at), levels + from);
                                         });
                         });
        },
        [&](uint64_t first, uint64_t count, float* decoded) {
          for_each_unit(first, count, [&](float unit, uint64_t from, uint64_t values) {
            scale(kernels, levels + from, values, unit, decoded + (from - first),
                  DecodeMode::kStore);
          });
        });
    return write_levels(parameters().coder, parameters().levels, levels, n, slot, kernels);
  }

  template <typename Level>
  bool decode_levels(const Decoding& decoding, uint64_t chunk, std::span<const uint8_t> bytes,
                     float* out) const {
    const Kernels& kernels = decoding.kernels;
    alignas(64) Level levels[kChunkValues];
    const uint64_t n = decoding.shape.chunks.values(chunk);
    if (!read_levels(parameters().coder, parameters().levels, bytes, n, levels, kernels)) {
      return false;
    }
    decoding.shape.for_each_piece(chunk, [&](uint64_t group, uint64_t at, uint64_t count) {
      scale(kernels, levels + at, count, decoding.scale(group), out + at, decoding.mode);
    });
    return true;
  }

  static void scale(const Kernels& kernels, const int8_t* levels, uint64_t n, float unit,
                    float* out, DecodeMode mode) {
    kernels.scale_levels(levels, n, unit, out, mode);
  }
  static void scale(const Kernels& kernels, const int16_t* levels, uint64_t n, float unit,
                    float* out, DecodeMode mode) {
    kernels.scale_wide_levels(levels, n, unit, out, mode);
  }
};

}  // namespace

const CodecEntry codec_entries::qsgd = entry<QsgdCodec>();

}  // namespace gradwire
