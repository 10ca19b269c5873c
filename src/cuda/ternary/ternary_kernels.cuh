#pragma once

// The kernels of a codec of trits, put together.

#include <cstdint>

#include "base/return_if_error.h"
#include "cuda/fixed/fixed_decode.cuh"
#include "cuda/ternary/packed_trits.cuh"
#include "cuda/ternary/rice_decode.cuh"
#include "cuda/ternary/ternary_decode.cuh"
#include "cuda/ternary/ternary_encode.cuh"

namespace gradwire::cuda {

template <typename Quantizer>
class TernaryKernels final : public CodecKernels {
 public:
  TernaryKernels(Quantizer quantizer, TernaryCoder coder, uint64_t group_size)
      : quantizer_(quantizer), layout_(coder), group_size_(group_size) {}

  uint64_t group_size() const override { return group_size_; }

  Status encode(const Segments& segments, const EncodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    const Encoding encoding(segments, arguments, segments.scales, segments.chunks, scratch);
    Quantizer quantizer = quantizer_;
    quantizer.take_scratch(segments, scratch);
    if (scratch.counts()) return {};
    GW_RETURN_IF_ERROR(encoding.clear(segments, stream));
    GW_RETURN_IF_ERROR(quantizer.measure(segments, encoding.input, encoding.magnitudes, stream));
    return launch(encode_ternary<Quantizer>, segments.chunks, stream, segments, encoding, quantizer,
                  layout_);
  }

  Status decode(const Segments& segments, const DecodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    if (layout_.coder == TernaryCoder::kNone) {
      return decode_fixed_payloads<PackedTrits<kTritsPerByte>>(segments, arguments, scratch,
                                                               stream);
    }
    if (layout_.coder == TernaryCoder::kTwoBit) {
      return decode_fixed_payloads<PackedTrits<kTwoBitTrits>>(segments, arguments, scratch, stream);
    }
    return decode_coded(
        segments, arguments, layout_, scratch, stream, [&](const Decoding& decoding) -> Status {
          GW_RETURN_IF_ERROR(
              launch(decode_ternary, segments.chunks, stream, segments, decoding, layout_.coder));
          if (layout_.coder != TernaryCoder::kRice) return {};
          const uint32_t each = chunks_a_block(segments.chunks);
          return launch(decode_rice, (segments.chunks + each - 1) / each, stream, segments,
                        decoding, each);
        });
  }

 private:
  Quantizer quantizer_;
  TernaryLayout layout_;
  uint64_t group_size_;
};

}  // namespace gradwire::cuda
