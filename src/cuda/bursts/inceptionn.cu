#include "base/return_if_error.h"
#include "codecs/inceptionn/inceptionn.h"
#include "codecs/registry.h"
#include "cuda/bursts/burst_decode.cuh"
#include "cuda/bursts/burst_encode.cuh"

namespace gradwire::cuda {
namespace {

class InceptionnKernels final : public CodecKernels {
 public:
  explicit InceptionnKernels(const FloatClip& clip) : clip_(clip) {}

  uint64_t group_size() const override { return 0; }

  Status encode(const Segments& segments, const EncodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    const uint64_t tiles = uint64_t{kTiles} * segments.chunks;
    const Encoding encoding(segments, arguments, /*scales=*/0, tiles, scratch);
    if (scratch.counts()) return {};
    GW_RETURN_IF_ERROR(encoding.clear(segments, stream));
    // Without a residual, non-finite values are sent as they are.
    if (arguments.residual_type != ResidualType::kNone) {
      GW_RETURN_IF_ERROR(queue_magnitudes(segments, encoding.input, encoding.magnitudes, stream));
    }
    GW_RETURN_IF_ERROR(launch(encode_bursts, tiles, stream, segments, encoding, clip_));
    return launch(write_burst_sizes, blocks_for(segments.chunks), stream, segments, encoding);
  }

  Status decode(const Segments& segments, const DecodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    return decode_coded(segments, arguments, BurstLayout(), scratch, stream,
                        [&](const Decoding& decoding) {
                          return launch(decode_bursts, segments.chunks, stream, segments, decoding);
                        });
  }

 private:
  FloatClip clip_;
};

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  return std::make_unique<InceptionnKernels>(parameters_of<InceptionnParameters>(codec)->clip());
}

}  // namespace

const KernelsFactory kernel_factories::inceptionn = create;

}  // namespace gradwire::cuda
