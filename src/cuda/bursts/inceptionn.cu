#include "codecs/inceptionn/inceptionn.h"
#include "codecs/registry.h"
#include "cuda/bursts/burst_decode.cuh"
#include "cuda/bursts/burst_encode.cuh"

namespace gradwire::cuda {
namespace {

class InceptionnKernels final : public CodecKernels {
 public:
  explicit InceptionnKernels(const FloatClip& clip) : clip_(clip) {}

  void encode(Call& call, const EncodeArguments& arguments) const override {
    const uint64_t tiles = uint64_t{kTiles} * call.segments.chunks;
    const Encoding encoding(call, arguments, /*scales=*/0, tiles);
    // Without a residual, non-finite values are sent as they are.
    if (encoding.input.keeps_residual()) measure_magnitudes(call, encoding);
    call.launch(encode_bursts, tiles, encoding, clip_);
    call.launch(write_burst_sizes, blocks_for(call.segments.chunks), encoding);
  }

  void decode(Call& call, const DecodeArguments& arguments) const override {
    decode_coded(call, arguments, NoScales(), [&](const Decoding& decoding) {
      call.launch(decode_bursts, call.segments.chunks, decoding);
    });
  }

 private:
  FloatClip clip_;
};

}  // namespace

std::unique_ptr<const CodecKernels> kernel_factories::inceptionn(const Codec& codec) {
  return std::make_unique<InceptionnKernels>(parameters_of<InceptionnParameters>(codec)->clip());
}

}  // namespace gradwire::cuda
