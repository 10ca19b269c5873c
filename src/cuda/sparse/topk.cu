#include "base/return_if_error.h"
#include "codecs/registry.h"
#include "codecs/topk/topk.h"
#include "cuda/common/thresholds.cuh"
#include "cuda/sparse/sparse_decode.cuh"
#include "cuda/sparse/sparse_encode.cuh"

namespace gradwire::cuda {
namespace {

class TopkKernels final : public CodecKernels {
 public:
  explicit TopkKernels(const TopkParameters& parameters)
      : ratio_(parameters.ratio), layout_{parameters.values, parameters.index} {}

  uint64_t group_size() const override { return 0; }

  Status encode(const Segments& segments, const EncodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    const Encoding encoding(segments, arguments, /*scales=*/0, segments.chunks, scratch);
    auto* thresholds = scratch.take<float>(segments.count);
    if (scratch.counts()) return {};
    GW_RETURN_IF_ERROR(encoding.clear(segments, stream));
    GW_RETURN_IF_ERROR(queue_magnitudes(segments, encoding.input, encoding.magnitudes, stream));
    GW_RETURN_IF_ERROR(launch(find_thresholds, segments.count, stream, segments, encoding.input,
                              ratio_, thresholds));
    return launch(encode_large, segments.chunks, stream, segments, encoding, layout_,
                  static_cast<const float*>(thresholds));
  }

  Status decode(const Segments& segments, const DecodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    return decode_coded(
        segments, arguments, layout_, scratch, stream, [&](const Decoding& decoding) {
          return launch(decode_large, segments.chunks, stream, segments, decoding, layout_);
        });
  }

 private:
  float ratio_;
  SparseLayout layout_;
};

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  return std::make_unique<TopkKernels>(*parameters_of<TopkParameters>(codec));
}

}  // namespace

const KernelsFactory kernel_factories::topk = create;

}  // namespace gradwire::cuda
