#pragma once

// The kernels of a codec of trits, put together.

#include <algorithm>
#include <cstdint>

#include "base/return_if_error.h"
#include "cuda/codec_kernels.h"
#include "cuda/fixed_decode.cuh"
#include "cuda/packed_trits.cuh"
#include "cuda/rice_decode.cuh"
#include "cuda/sources.cuh"
#include "cuda/ternary_decode.cuh"
#include "cuda/ternary_encode.cuh"

namespace gradwire::cuda {

template <typename Quantizer>
class TernaryKernels final : public CodecKernels {
 public:
  // bucket: values that share a scale; 0: all of a segment.
  TernaryKernels(Quantizer quantizer, TernaryCoder coder, uint64_t bucket)
      : quantizer_(quantizer), coder_(coder), bucket_(bucket) {}

  uint64_t bucket() const override { return bucket_; }

  uint64_t encode_scratch_size(const Segments& segments) const override {
    return scratch_size(segments, [&](const Segments& all, ScratchLayout& layout) {
      encode_scratch(all, layout);
      Quantizer(quantizer_).take_scratch(all, layout);
    });
  }

  uint64_t decode_scratch_size(const Segments& segments, uint32_t sources) const override {
    if (coder_ == TernaryCoder::kNone) {
      return fixed_decode_scratch_size<PackedTrits<kTritsPerByte>>(segments, sources);
    }
    if (coder_ == TernaryCoder::kTwoBit) {
      return fixed_decode_scratch_size<PackedTrits<kTwoBitTrits>>(segments, sources);
    }
    return scratch_size(segments, decode_scratch);
  }

  Status encode(const Segments& segments, const EncodeArguments& arguments,
                cudaStream_t stream) const override {
    ScratchLayout layout(arguments.scratch_dev);
    const TernaryScratch scratch = encode_scratch(segments, layout);
    Quantizer quantizer = quantizer_;
    quantizer.take_scratch(segments, layout);
    const uint64_t cleared =
        std::max<uint64_t>({segments.count, segments.chunks, segments.scales, 1});
    GW_RETURN_IF_ERROR(launch(clear_scratch, blocks_for(cleared), stream, segments,
                              arguments.encoded_dev, scratch));
    const Input input(arguments);
    GW_RETURN_IF_ERROR(quantizer.measure(segments, input, scratch.magnitudes, stream));
    return launch(encode_ternary<Quantizer>, segments.chunks, stream, segments, input, quantizer,
                  arguments.draw, coder_, reinterpret_cast<uint8_t*>(arguments.payloads_dev),
                  arguments.encoded_dev, scratch);
  }

  Status decode(const Segments& segments, const DecodeArguments& arguments,
                cudaStream_t stream) const override {
    if (coder_ == TernaryCoder::kNone) {
      return decode_fixed_payloads<PackedTrits<kTritsPerByte>>(segments, arguments, stream);
    }
    if (coder_ == TernaryCoder::kTwoBit) {
      return decode_fixed_payloads<PackedTrits<kTwoBitTrits>>(segments, arguments, stream);
    }
    return decode_one_by_one(segments, arguments, stream, [&](const DecodeArguments& one) {
      return decode_chunks(segments, one, stream);
    });
  }

 private:
  // Of coders whose chunks vary in size.
  Status decode_chunks(const Segments& segments, const DecodeArguments& arguments,
                       cudaStream_t stream) const {
    ScratchLayout layout(arguments.scratch_dev);
    const DecodeScratch scratch = decode_scratch(segments, layout);
    const auto* payloads = reinterpret_cast<const uint8_t*>(arguments.payloads_dev);
    GW_RETURN_IF_ERROR(launch(find_chunks, segments.count, stream, segments, payloads,
                              arguments.places_dev, arguments.decoded_dev, scratch));
    GW_RETURN_IF_ERROR(launch(decode_ternary, segments.chunks, stream, segments, payloads,
                              arguments.places_dev, coder_, arguments.out_dev, arguments.mode,
                              arguments.decoded_dev, scratch));
    if (coder_ != TernaryCoder::kRice) return {};
    const uint32_t each = chunks_a_block(segments.chunks);
    return launch(decode_rice, (segments.chunks + each - 1) / each, stream, segments, payloads,
                  arguments.places_dev, each, arguments.out_dev, arguments.mode,
                  arguments.decoded_dev, scratch);
  }

  static TernaryScratch encode_scratch(const Segments& segments, ScratchLayout& layout) {
    return {.magnitudes = {.of_scale = layout.take<uint32_t>(segments.scales),
                           .of_segment = layout.take<uint32_t>(segments.count)},
            .told = layout.take<uint64_t>(segments.chunks),
            .ticket = layout.take<uint32_t>(1)};
  }
  static DecodeScratch decode_scratch(const Segments& segments, ScratchLayout& layout) {
    return {.begin = layout.take<uint64_t>(segments.chunks),
            .size = layout.take<uint32_t>(segments.chunks)};
  }

  Quantizer quantizer_;
  TernaryCoder coder_;
  uint64_t bucket_;
};

}  // namespace gradwire::cuda
