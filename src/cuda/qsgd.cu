#include <algorithm>

#include "codecs/qsgd/qsgd.h"
#include "cuda/elias_decode.cuh"
#include "cuda/elias_encode.cuh"
#include "cuda/fixed_decode.cuh"
#include "cuda/level_decode.cuh"
#include "cuda/level_encode.cuh"
#include "cuda/sources.cuh"

namespace gradwire::cuda {
namespace {

class QsgdKernels final : public CodecKernels {
 public:
  explicit QsgdKernels(const QsgdParameters& parameters)
      : parameters_(parameters),
        layout_{parameters.levels, parameters.coder},
        format_{parameters.levels, static_cast<uint32_t>(level_width(parameters.levels))} {}

  uint64_t bucket() const override { return parameters_.bucket; }

  uint64_t encode_scratch_size(const Segments& segments) const override {
    return scratch_size(
        segments, [&](const Segments& all, ScratchLayout& layout) { encode_scratch(all, layout); });
  }

  uint64_t decode_scratch_size(const Segments& segments, uint32_t sources) const override {
    if (fixed()) return fixed_decode_scratch_size<LevelFormat>(segments, sources);
    return scratch_size(segments, decode_scratch);
  }

  Status encode(const Segments& segments, const EncodeArguments& arguments,
                cudaStream_t stream) const override {
    ScratchLayout layout(arguments.scratch_dev);
    const LevelScratch scratch = encode_scratch(segments, layout);
    const Input input(arguments);
    auto* payloads = reinterpret_cast<uint8_t*>(arguments.payloads_dev);
    const uint64_t cleared =
        std::max<uint64_t>({segments.count, segments.chunks, segments.scales, 1});
    GW_RETURN_IF_ERROR(launch(clear_level_scratch, blocks_for(cleared), stream, segments,
                              arguments.encoded_dev, scratch));
    if (scratch.squares != nullptr) {
      GW_RETURN_IF_ERROR(launch(sum_squares, blocks_for(most_parts(segments) * kMomentLanes),
                                stream, segments, input, scratch.squares));
    } else {
      GW_RETURN_IF_ERROR(queue_magnitudes(segments, input, scratch.magnitudes, stream));
    }
    GW_RETURN_IF_ERROR(launch(
        make_steps, blocks_for(segments.scales), stream, segments, parameters_.levels,
        scratch.magnitudes, static_cast<const double*>(scratch.squares), scratch.steps, payloads));
    if (fixed()) {
      return launch(encode_fixed_levels, segments.chunks, stream, segments, input,
                    parameters_.levels, arguments.draw, payloads, arguments.encoded_dev, scratch);
    }
    return launch(encode_elias_levels, segments.chunks, stream, segments, input, layout_,
                  arguments.draw, payloads, arguments.encoded_dev, scratch);
  }

  Status decode(const Segments& segments, const DecodeArguments& arguments,
                cudaStream_t stream) const override {
    if (fixed()) return decode_fixed_payloads(segments, arguments, stream, format_);
    return decode_one_by_one(segments, arguments, stream, [&](const DecodeArguments& one) {
      return decode_codes(segments, one, stream);
    });
  }

 private:
  [[nodiscard]] bool fixed() const { return parameters_.coder == LevelCoder::kFixed; }

  Status decode_codes(const Segments& segments, const DecodeArguments& arguments,
                      cudaStream_t stream) const {
    ScratchLayout layout(arguments.scratch_dev);
    const LevelDecodeScratch scratch = decode_scratch(segments, layout);
    const auto* payloads = reinterpret_cast<const uint8_t*>(arguments.payloads_dev);
    GW_RETURN_IF_ERROR(
        launch(clear_any, blocks_for(segments.count), stream, segments, scratch.any));
    GW_RETURN_IF_ERROR(launch(find_coded_chunks<LevelLayout>, segments.count, stream, segments,
                              payloads, arguments.places_dev, layout_, arguments.decoded_dev,
                              scratch.chunks));
    GW_RETURN_IF_ERROR(launch(read_units, blocks_for(segments.scales), stream, segments, payloads,
                              arguments.places_dev, parameters_.levels, arguments.decoded_dev,
                              scratch));
    return launch(decode_elias_levels, (segments.chunks + kWarps - 1) / kWarps, stream, segments,
                  payloads, layout_, arguments.out_dev, arguments.mode, arguments.decoded_dev,
                  scratch);
  }

  LevelScratch encode_scratch(const Segments& segments, ScratchLayout& layout) const {
    const bool squares = parameters_.norm == Norm::kL2;
    return {.magnitudes = {.of_scale = layout.take<uint32_t>(segments.scales),
                           .of_segment = layout.take<uint32_t>(segments.count)},
            .steps = layout.take<LevelStep>(segments.scales),
            .squares = squares ? layout.take<double>(most_parts(segments)) : nullptr,
            .told = fixed() ? nullptr : layout.take<uint64_t>(segments.chunks),
            .ticket = layout.take<uint32_t>(1)};
  }
  static LevelDecodeScratch decode_scratch(const Segments& segments, ScratchLayout& layout) {
    return {.chunks = CodedChunks::take(segments, layout),
            .units = layout.take<float>(segments.scales),
            .any = layout.take<uint32_t>(segments.count)};
  }

  QsgdParameters parameters_;
  LevelLayout layout_;  // of Elias codes
  LevelFormat format_;  // of levels of one width
};

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  return std::make_unique<QsgdKernels>(qsgd_parameters(codec).value());
}

}  // namespace

const KernelsFactory kernel_factories::qsgd = create;

}  // namespace gradwire::cuda
