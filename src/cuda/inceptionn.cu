#include <algorithm>

#include "base/return_if_error.h"
#include "codecs/inceptionn/inceptionn.h"
#include "cuda/burst_decode.cuh"
#include "cuda/burst_encode.cuh"
#include "cuda/sources.cuh"

namespace gradwire::cuda {
namespace {

class InceptionnKernels final : public CodecKernels {
 public:
  explicit InceptionnKernels(const FloatClip& clip) : clip_(clip) {}

  uint64_t bucket() const override { return 0; }

  uint64_t encode_scratch_size(const Segments& segments) const override {
    return scratch_size(segments, encode_scratch);
  }

  uint64_t decode_scratch_size(const Segments& segments, uint32_t) const override {
    return scratch_size(segments, CodedChunks::take);
  }

  Status encode(const Segments& segments, const EncodeArguments& arguments,
                cudaStream_t stream) const override {
    ScratchLayout layout(arguments.scratch_dev);
    const BurstScratch scratch = encode_scratch(segments, layout);
    const Input input(arguments);
    auto* payloads = reinterpret_cast<uint8_t*>(arguments.payloads_dev);
    const uint64_t tiles = uint64_t{kTiles} * segments.chunks;
    const uint64_t cleared = std::max<uint64_t>({segments.count, tiles, 1});
    GW_RETURN_IF_ERROR(launch(clear_burst_scratch, blocks_for(cleared), stream, segments,
                              arguments.encoded_dev, scratch));
    // Without a residual, what is not finite passes through.
    if (arguments.residual_type != ResidualType::kNone) {
      GW_RETURN_IF_ERROR(queue_magnitudes(segments, input, scratch.magnitudes, stream));
    }
    GW_RETURN_IF_ERROR(launch(encode_bursts, tiles, stream, segments, input, clip_, payloads,
                              arguments.encoded_dev, scratch));
    return launch(write_burst_sizes, blocks_for(segments.chunks), stream, segments, payloads,
                  arguments.encoded_dev, scratch);
  }

  Status decode(const Segments& segments, const DecodeArguments& arguments,
                cudaStream_t stream) const override {
    return decode_one_by_one(segments, arguments, stream, [&](const DecodeArguments& one) {
      return decode_chunks(segments, one, stream);
    });
  }

 private:
  static Status decode_chunks(const Segments& segments, const DecodeArguments& arguments,
                              cudaStream_t stream) {
    ScratchLayout layout(arguments.scratch_dev);
    const CodedChunks chunks = CodedChunks::take(segments, layout);
    const auto* payloads = reinterpret_cast<const uint8_t*>(arguments.payloads_dev);
    GW_RETURN_IF_ERROR(launch(find_coded_chunks<BurstLayout>, segments.count, stream, segments,
                              payloads, arguments.places_dev, BurstLayout(), arguments.decoded_dev,
                              chunks));
    return launch(decode_bursts, segments.chunks, stream, segments, payloads, arguments.out_dev,
                  arguments.mode, arguments.decoded_dev, chunks);
  }

  static BurstScratch encode_scratch(const Segments& segments, ScratchLayout& layout) {
    return {
        .magnitudes = {.of_scale = nullptr, .of_segment = layout.take<uint32_t>(segments.count)},
        .told = layout.take<uint64_t>(uint64_t{kTiles} * segments.chunks),
        .ticket = layout.take<uint32_t>(1)};
  }

  FloatClip clip_;
};

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  return std::make_unique<InceptionnKernels>(inceptionn_clip(codec).value());
}

}  // namespace

const KernelsFactory kernel_factories::inceptionn = create;

}  // namespace gradwire::cuda
