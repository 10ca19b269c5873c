#include <cfloat>

#include "codecs/qsgd/qsgd.h"
#include "codecs/registry.h"
#include "cuda/fixed/fixed_decode.cuh"
#include "cuda/levels/elias_decode.cuh"
#include "cuda/levels/elias_encode.cuh"

namespace gradwire::cuda {
namespace {

// Levels of one width, as fixed_decode.cuh takes them. Their scales, as those of levels in Elias
// codes, are units, and s times a unit is finite, too.
struct LevelFormat : FloatScales {
  static constexpr bool kSparse = false;

  int32_t levels;
  uint32_t width;

  __device__ bool valid(const uint8_t* unit, bool& any) const {
    return FloatScales::valid(unit, any) && load(unit) * static_cast<float>(levels) <= FLT_MAX;
  }

  // The code lies in one byte or two.
  __device__ uint32_t code(const uint8_t* values, uint32_t at) const {
    const uint32_t bit = at * width;
    uint32_t code = values[bit / 8];
    if (bit % 8 + width > 8) code |= static_cast<uint32_t>(values[bit / 8 + 1]) << 8;
    return code;
  }
  __device__ int32_t level(uint32_t code, uint32_t at) const {
    return static_cast<int32_t>(code >> at * width % 8 & ((1u << width) - 1)) - levels;
  }
  __device__ bool valid_code(uint32_t code, uint32_t at) const { return level(code, at) <= levels; }
  // The bits after the last level are 0.
  __device__ bool valid_end(uint32_t code, uint32_t n) const {
    return code >> ((n - 1) * width % 8 + width) == 0;
  }
  __device__ float value(uint32_t code, uint32_t at, Scale unit) const {
    return level_value(level(code, at), unit);
  }
};

class QsgdKernels final : public CodecKernels {
 public:
  explicit QsgdKernels(const QsgdParameters& parameters)
      : parameters_(parameters),
        format_{{}, parameters.levels, static_cast<uint32_t>(level_width(parameters.levels))} {}

  void encode(Call& call, const EncodeArguments& arguments) const override {
    const Segments& segments = call.segments;
    const Encoding encoding(call, arguments, segments.scales, fixed() ? 0 : segments.chunks);
    auto* steps = call.take<LevelStep>(segments.scales);
    double* squares = nullptr;
    if (parameters_.norm == Norm::kL2) {
      squares = call.take<double>(most_parts(segments));
      call.launch(sum_squares, blocks_for(most_parts(segments) * kMomentLanes), encoding.input,
                  squares);
    } else {
      measure_magnitudes(call, encoding);
    }
    call.launch(make_steps, blocks_for(segments.scales), encoding, parameters_.levels, squares,
                steps);
    if (fixed()) {
      call.launch(encode_fixed_levels, segments.chunks, encoding, parameters_.levels, steps);
    } else {
      call.launch(encode_elias_levels, segments.chunks, encoding, parameters_, steps);
    }
  }

  void decode(Call& call, const DecodeArguments& arguments) const override {
    if (fixed()) return decode_fixed_payloads(call, arguments, format_);
    decode_coded(call, arguments, format_, [&](const Decoding& decoding) {
      call.launch(decode_elias_levels, (call.segments.chunks + kWarps - 1) / kWarps, decoding,
                  parameters_);
    });
  }

 private:
  [[nodiscard]] bool fixed() const { return parameters_.coder == LevelCoder::kFixed; }

  QsgdParameters parameters_;
  LevelFormat format_;
};

}  // namespace

std::unique_ptr<const CodecKernels> kernel_factories::qsgd(const Codec& codec) {
  const QsgdParameters& parameters = *parameters_of<QsgdParameters>(codec);
  // The levels of a chunk are kept in shared memory, a byte each.
  if (parameters.levels > kLargestByteLevel) return nullptr;
  return std::make_unique<QsgdKernels>(parameters);
}

}  // namespace gradwire::cuda
