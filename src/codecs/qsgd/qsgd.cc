#include "codecs/qsgd/qsgd.h"

#include <algorithm>
#include <atomic>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/draws.h"
#include "codecs/input.h"
#include "codecs/qsgd/qsgd_shape.h"
#include "codecs/registry.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"bits", "4", "2 to 8", "bits of a level with coder=fixed: levels up to s = 2^(bits - 1) - 1"},
    {"levels", "by bits", "1 to 127", "the largest level s, instead of bits"},
    {"bucket", "512", "multiple of 8", "values that share a scale"},
    {"norm", "max", "max|l2", "what the scale is made of: largest magnitude, or Euclidean norm"},
    {"coder", "fixed", "fixed|elias|elias-dense",
     "equal bits for each level, or Elias codes: of those that are not 0, or of all"},
};

constexpr CodecInfo kInfo = {
    .id = 24,
    .name = "qsgd",
    .summary = "levels between -norm and norm, drawn without bias; fixed bits or Elias codes",
    .source = "QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic; NIPS 2017), section 3",
    .error_feedback = false,
    .lossless = false,
    .parameters = kParameters,
};

// Bits of param_a (codecs/qsgd/spec.md).
constexpr uint16_t kLevelMask = 127;
constexpr int kCoderShift = 7;
constexpr uint16_t kCoderMask = 3;
constexpr int kNormShift = 9;
constexpr int kReservedShift = 10;
constexpr int32_t kDefaultLevels = QsgdParameters().levels;
constexpr uint32_t kDefaultBucket = QsgdParameters().bucket;

// Euclidean norm of the n values from `begin` on, FLT_MAX where it is more; NaN or infinity where
// one of them is. The order of the additions stands in spec/format.md.
float l2_norm(const Input& input, uint64_t begin, uint64_t n, const Kernels& kernels) {
  double squares = 0;
  input.for_each_part(begin, n, [&](uint64_t, uint64_t count, const float* b) {
    squares += kernels.moments(b, count).squares;
  });
  return l2_norm_of(squares);
}

// First pass: the unit of each bucket. Returns the largest norm, as bits of a float >= 0.
uint32_t put_units(const QsgdParameters& parameters, const Input& input, const Buckets& buckets,
                   std::byte* units, Execution& execution) {
  const auto put = [&](uint64_t bucket, uint32_t norm) {
    // NaN and infinity give no unit; the caller sees them.
    const float unit = norm < kNonFiniteBits ? level_unit(float_of(norm), parameters.levels) : 0.0f;
    store_le_f32(units + bucket * sizeof(float), unit);
  };
  if (parameters.norm == Norm::kMax) return for_each_absmax(input, buckets, execution, put);
  std::atomic<uint32_t> overall{0};
  const uint64_t buckets_a_task = std::max<uint64_t>(1, kChunkValues / buckets.bucket);
  const uint64_t tasks = (buckets.count + buckets_a_task - 1) / buckets_a_task;
  execution.for_each(tasks, [&](size_t task) {
    const uint64_t first = task * buckets_a_task;
    for (uint64_t i = first; i < std::min(buckets.count, first + buckets_a_task); ++i) {
      const uint32_t norm =
          magnitude_bits(l2_norm(input, buckets.begin(i), buckets.values(i), execution.kernels()));
      raise_to(overall, norm);
      put(i, norm);
    }
  });
  return overall.load();
}

class QsgdCodec final : public Codec {
 public:
  QsgdCodec(QsgdParameters parameters, ResidualType residual_type)
      : Codec(residual_type), parameters_(parameters) {}

  const CodecInfo& info() const noexcept override { return kInfo; }

  WireCodec wire() const noexcept override {
    // The norm is told to whoever inspects a frame; no decoder needs it.
    return {.id = kInfo.id,
            .param_a = static_cast<uint16_t>(parameters_.levels |
                                             static_cast<int>(parameters_.coder) << kCoderShift |
                                             static_cast<int>(parameters_.norm) << kNormShift),
            .param_b = parameters_.bucket};
  }

  uint64_t max_payload_size(uint64_t n) const noexcept override {
    return shape(n).chunks.max_size();
  }

  Status check_size(uint64_t n, uint64_t size) const override {
    return check_qsgd_size(shape(n), kInfo.name, size);
  }

  Result<uint64_t> encode(const InputView& x, const ResidualView& residual, const DrawContext& draw,
                          std::span<std::byte> payload, Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    GW_RETURN_IF_ERROR(check_residual_size(kInfo, x.size(), residual));
    if (x.empty()) return 0;
    const QsgdShape shape = this->shape(x.size());
    const Kernels& kernels = execution.kernels();
    const Input input(x, residual, kernels);
    std::byte* units = payload.data();
    const uint32_t largest = put_units(parameters_, input, shape.buckets, units, execution);
    if (largest >= kNonFiniteBits) return check_finite(kInfo, x, residual);
    // Nothing is sent but the header. A residual that the input has just cancelled is now 0.
    if (largest == 0 && !input.keeps_residual()) return 0;
    const DrawStream stream = DrawStream::create(draw.seed, draw.stream, draw.step);
    const uint64_t size =
        encode_chunks(shape.chunks, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
          return encode_chunk(shape, chunk, input, stream, units, slot, kernels);
        });
    return largest == 0 ? 0 : size;
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    return decode_qsgd(shape(out.size()), kInfo.name, payload, out, mode, execution);
  }

  [[nodiscard]] const QsgdParameters& parameters() const { return parameters_; }

  [[nodiscard]] QsgdShape shape(uint64_t n) const {
    return {n, parameters_.levels, parameters_.coder, parameters_.bucket};
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    const int32_t s = parameters_.levels;
    if ((s & (s + 1)) != 0) {
      append_parameter(text, "levels", std::to_string(s));
    } else if (s != kDefaultLevels) {
      append_parameter(text, "bits", std::to_string(level_width(s)));
    }
    append_bucket(text, parameters_.bucket, kDefaultBucket);
    if (parameters_.norm == Norm::kL2) append_parameter(text, "norm", "l2");
    if (parameters_.coder == LevelCoder::kSparse) append_parameter(text, "coder", "elias");
    if (parameters_.coder == LevelCoder::kDense) append_parameter(text, "coder", "elias-dense");
    return text;
  }

 private:
  // Quantizes and codes one chunk into `slot`; its values' residuals become what is left of them.
  static uint64_t encode_chunk(const QsgdShape& shape, uint64_t chunk, const Input& input,
                               const DrawStream& stream, const std::byte* units, uint8_t* slot,
                               const Kernels& kernels) {
    const uint64_t begin = shape.chunks.begin(chunk);
    const uint64_t n = shape.chunks.values(chunk);
    alignas(64) int8_t levels[kChunkValues];
    const auto for_each_unit = [&](uint64_t first, uint64_t count, const auto& body) {
      shape.buckets.for_each_piece(begin + first, begin + first + count,
                                   [&](uint64_t bucket, uint64_t from, uint64_t values) {
                                     body(load_le_f32(units + bucket * sizeof(float)), from - begin,
                                          values);
                                   });
    };
    input.encode_parts(
        begin, n,
        [&](uint64_t first, uint64_t count, const float* b) {
          for_each_drawn(
              stream, begin + first, count, kernels,
              [&](uint64_t at, uint64_t drawn, const uint32_t* words) {
                for_each_unit(first + at, drawn, [&](float unit, uint64_t from, uint64_t values) {
                  if (unit == 0.0f) {
                    std::fill_n(levels + from, values, int8_t{0});
                  } else {
                    kernels.quantize_levels(b + (from - first), values,
                                            level_scale(unit, shape.levels),
                                            words + (from - first - at), levels + from);
                  }
                });
              });
        },
        [&](uint64_t first, uint64_t count, float* decoded) {
          for_each_unit(first, count, [&](float unit, uint64_t from, uint64_t values) {
            kernels.scale_levels(levels + from, values, unit, decoded + (from - first));
          });
        });
    return write_levels(shape, chunk, levels, slot, kernels);
  }

  QsgdParameters parameters_;
};

Result<int32_t> parse_levels(const Parameters& given) {
  Result<size_t> bits = given.choice("bits", {"2", "3", "4", "5", "6", "7", "8"}, 2);
  if (!bits.ok()) return bits.status();
  Result<uint32_t> levels = given.count("levels", 1, kLargestLevel, 0);
  if (!levels.ok()) return levels.status();
  if (given.has("bits") && given.has("levels")) {
    return Status(StatusCode::kBadParameter, "codec 'qsgd': give bits or levels, not both");
  }
  if (given.has("levels")) return static_cast<int32_t>(levels.value());
  return (1 << (bits.value() + 1)) - 1;
}

Result<std::shared_ptr<const Codec>> create(const Parameters& given, ResidualType residual_type) {
  Result<int32_t> levels = parse_levels(given);
  if (!levels.ok()) return levels.status();
  Result<uint32_t> bucket = given.bucket(8, kDefaultBucket);
  if (!bucket.ok()) return bucket.status();
  Result<size_t> norm = given.choice("norm", {"max", "l2"}, 0);
  if (!norm.ok()) return norm.status();
  Result<size_t> coder = given.choice("coder", {"fixed", "elias", "elias-dense"}, 0);
  if (!coder.ok()) return coder.status();
  const QsgdParameters parameters = {.levels = levels.value(),
                                     .coder = static_cast<LevelCoder>(coder.value()),
                                     .norm = static_cast<Norm>(norm.value()),
                                     .bucket = bucket.value()};
  return std::shared_ptr<const Codec>(std::make_shared<QsgdCodec>(parameters, residual_type));
}

Result<std::shared_ptr<const Codec>> from_wire(const WireCodec& wire, Dtype) {
  const int coder = wire.param_a >> kCoderShift & kCoderMask;
  const QsgdParameters parameters = {.levels = wire.param_a & kLevelMask,
                                     .coder = static_cast<LevelCoder>(coder),
                                     .norm = static_cast<Norm>(wire.param_a >> kNormShift & 1),
                                     .bucket = wire.param_b};
  if (wire.param_a >> kReservedShift != 0 || parameters.levels == 0 || coder == 3) {
    return Status(StatusCode::kReservedBits,
                  "qsgd: param_a " + std::to_string(wire.param_a) + " is reserved");
  }
  if (parameters.bucket == 0 || parameters.bucket % 8 != 0) {
    return Status(StatusCode::kReservedBits,
                  "qsgd: bucket " + std::to_string(parameters.bucket) + " is not a multiple of 8");
  }
  return std::shared_ptr<const Codec>(std::make_shared<QsgdCodec>(parameters, ResidualType::kNone));
}

}  // namespace

std::optional<QsgdShape> qsgd_shape(const Codec& codec, uint64_t n) {
  const auto* qsgd = dynamic_cast<const QsgdCodec*>(&codec);
  return qsgd == nullptr ? std::nullopt : std::optional(qsgd->shape(n));
}

std::optional<QsgdParameters> qsgd_parameters(const Codec& codec) {
  const auto* qsgd = dynamic_cast<const QsgdCodec*>(&codec);
  return qsgd == nullptr ? std::nullopt : std::optional(qsgd->parameters());
}

const CodecEntry codec_entries::qsgd = {.info = &kInfo, .create = create, .from_wire = from_wire};

}  // namespace gradwire
