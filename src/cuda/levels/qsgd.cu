#include "codecs/qsgd/qsgd.h"
#include "codecs/registry.h"
#include "cuda/fixed/fixed_decode.cuh"
#include "cuda/levels/elias_decode.cuh"
#include "cuda/levels/elias_encode.cuh"

namespace gradwire::cuda {
namespace {

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
  return std::make_unique<QsgdKernels>(*parameters_of<QsgdParameters>(codec));
}

}  // namespace gradwire::cuda
