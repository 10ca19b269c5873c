#include "codecs/registry.h"
#include "codecs/topk/topk.h"
#include "cuda/common/thresholds.cuh"
#include "cuda/sparse/sparse_decode.cuh"
#include "cuda/sparse/sparse_encode.cuh"

namespace gradwire::cuda {
namespace {

class TopkKernels final : public CodecKernels {
 public:
  explicit TopkKernels(const TopkParameters& parameters) : parameters_(parameters) {}

  void encode(Call& call, const EncodeArguments& arguments) const override {
    const Encoding encoding(call, arguments, /*scales=*/0, call.segments.chunks);
    auto* thresholds = call.take<float>(call.segments.count);
    measure_magnitudes(call, encoding);
    call.launch(find_thresholds, call.segments.count, encoding.input, parameters_.ratio,
                thresholds);
    call.launch(encode_large, call.segments.chunks, encoding, parameters_, thresholds);
  }

  void decode(Call& call, const DecodeArguments& arguments) const override {
    decode_coded(call, arguments, NoScales(), [&](const Decoding& decoding) {
      call.launch(decode_large, call.segments.chunks, decoding, parameters_);
    });
  }

 private:
  TopkParameters parameters_;
};

}  // namespace

std::unique_ptr<const CodecKernels> kernel_factories::topk(const Codec& codec) {
  return std::make_unique<TopkKernels>(*parameters_of<TopkParameters>(codec));
}

}  // namespace gradwire::cuda
