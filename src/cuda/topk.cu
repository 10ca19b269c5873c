#include <algorithm>

#include "base/return_if_error.h"
#include "codecs/topk/topk.h"
#include "cuda/sources.cuh"
#include "cuda/sparse_decode.cuh"
#include "cuda/sparse_encode.cuh"
#include "cuda/thresholds.cuh"

namespace gradwire::cuda {
namespace {

class TopkKernels final : public CodecKernels {
 public:
  explicit TopkKernels(const TopkParameters& parameters) : parameters_(parameters) {}

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
    const SparseScratch scratch = encode_scratch(segments, layout);
    const Input input(arguments);
    const uint64_t cleared = std::max<uint64_t>({segments.count, segments.chunks, 1});
    GW_RETURN_IF_ERROR(launch(clear_sparse_scratch, blocks_for(cleared), stream, segments,
                              arguments.encoded_dev, scratch));
    GW_RETURN_IF_ERROR(queue_magnitudes(segments, input, scratch.magnitudes, stream));
    GW_RETURN_IF_ERROR(launch(find_thresholds, segments.count, stream, segments, input,
                              parameters_.ratio, scratch.thresholds));
    return launch(encode_large, segments.chunks, stream, segments, input, parameters_.values,
                  parameters_.index, reinterpret_cast<uint8_t*>(arguments.payloads_dev),
                  arguments.encoded_dev, scratch);
  }

  Status decode(const Segments& segments, const DecodeArguments& arguments,
                cudaStream_t stream) const override {
    return decode_one_by_one(segments, arguments, stream, [&](const DecodeArguments& one) {
      return decode_chunks(segments, one, stream);
    });
  }

 private:
  Status decode_chunks(const Segments& segments, const DecodeArguments& arguments,
                       cudaStream_t stream) const {
    ScratchLayout layout(arguments.scratch_dev);
    const CodedChunks chunks = CodedChunks::take(segments, layout);
    const auto* payloads = reinterpret_cast<const uint8_t*>(arguments.payloads_dev);
    const SparseLayout sparse{parameters_.values, parameters_.index};
    GW_RETURN_IF_ERROR(launch(find_coded_chunks<SparseLayout>, segments.count, stream, segments,
                              payloads, arguments.places_dev, sparse, arguments.decoded_dev,
                              chunks));
    return launch(decode_large, segments.chunks, stream, segments, payloads, parameters_.values,
                  parameters_.index, arguments.out_dev, arguments.mode, arguments.decoded_dev,
                  chunks);
  }

  static SparseScratch encode_scratch(const Segments& segments, ScratchLayout& layout) {
    return {
        .magnitudes = {.of_scale = nullptr, .of_segment = layout.take<uint32_t>(segments.count)},
        .thresholds = layout.take<float>(segments.count),
        .told = layout.take<uint64_t>(segments.chunks),
        .ticket = layout.take<uint32_t>(1)};
  }

  TopkParameters parameters_;
};

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  return std::make_unique<TopkKernels>(topk_parameters(codec).value());
}

}  // namespace

const KernelsFactory kernel_factories::topk = create;

}  // namespace gradwire::cuda
