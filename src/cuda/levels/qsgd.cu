#include "base/return_if_error.h"
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
        layout_{{parameters.levels}, parameters.coder},
        format_{{parameters.levels}, static_cast<uint32_t>(level_width(parameters.levels))} {}

  uint64_t group_size() const override { return parameters_.group_size; }

  Status encode(const Segments& segments, const EncodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    const Encoding encoding(segments, arguments, segments.scales, fixed() ? 0 : segments.chunks,
                            scratch);
    auto* steps = scratch.take<LevelStep>(segments.scales);
    const bool by_squares = parameters_.norm == Norm::kL2;
    auto* squares = by_squares ? scratch.take<double>(most_parts(segments)) : nullptr;
    if (scratch.counts()) return {};
    GW_RETURN_IF_ERROR(encoding.clear(segments, stream));
    if (by_squares) {
      GW_RETURN_IF_ERROR(launch(sum_squares, blocks_for(most_parts(segments) * kMomentLanes),
                                stream, segments, encoding.input, squares));
    } else {
      GW_RETURN_IF_ERROR(queue_magnitudes(segments, encoding.input, encoding.magnitudes, stream));
    }
    GW_RETURN_IF_ERROR(launch(make_steps, blocks_for(segments.scales), stream, segments,
                              parameters_.levels, encoding.magnitudes,
                              static_cast<const double*>(squares), steps, encoding.payloads));
    const LevelStep* made = steps;
    if (fixed()) {
      return launch(encode_fixed_levels, segments.chunks, stream, segments, encoding,
                    parameters_.levels, made);
    }
    return launch(encode_elias_levels, segments.chunks, stream, segments, encoding, layout_, made);
  }

  Status decode(const Segments& segments, const DecodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    if (fixed()) return decode_fixed_payloads(segments, arguments, scratch, stream, format_);
    return decode_coded(
        segments, arguments, layout_, scratch, stream, [&](const Decoding& decoding) {
          return launch(decode_elias_levels, (segments.chunks + kWarps - 1) / kWarps, stream,
                        segments, decoding, layout_);
        });
  }

 private:
  [[nodiscard]] bool fixed() const { return parameters_.coder == LevelCoder::kFixed; }

  QsgdParameters parameters_;
  LevelLayout layout_;  // of Elias codes
  LevelFormat format_;  // of levels with one width
};

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  return std::make_unique<QsgdKernels>(*parameters_of<QsgdParameters>(codec));
}

}  // namespace

const KernelsFactory kernel_factories::qsgd = create;

}  // namespace gradwire::cuda
