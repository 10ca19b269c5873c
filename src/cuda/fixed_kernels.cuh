#pragma once

// The kernels of a codec whose payload has one size, put together.

#include <cstdint>

#include "base/return_if_error.h"
#include "cuda/codec_kernels.h"
#include "cuda/fixed_decode.cuh"
#include "cuda/fixed_encode.cuh"

namespace gradwire::cuda {

template <typename Format>
class FixedKernels final : public CodecKernels {
 public:
  // bucket: values that share a scale; 0: all of a segment.
  explicit FixedKernels(uint64_t bucket) : bucket_(bucket) {}

  uint64_t bucket() const override { return bucket_; }

  uint64_t encode_scratch_size(const Segments& segments) const override {
    ScratchLayout layout(nullptr);
    Format().take_scratch(segments, layout);
    return layout.size();
  }
  uint64_t decode_scratch_size(const Segments& segments, uint32_t sources) const override {
    return fixed_decode_scratch_size<Format>(segments, sources);
  }

  Status encode(const Segments& segments, const EncodeArguments& arguments,
                cudaStream_t stream) const override {
    ScratchLayout layout(arguments.scratch_dev);
    Format format;
    format.take_scratch(segments, layout);
    const Input input(arguments);
    GW_RETURN_IF_ERROR(format.prepare(segments, input, arguments.encoded_dev, stream));
    return launch(encode_fixed<Format>, segments.chunks, stream, segments, input, format,
                  reinterpret_cast<uint8_t*>(arguments.payloads_dev), arguments.encoded_dev);
  }

  Status decode(const Segments& segments, const DecodeArguments& arguments,
                cudaStream_t stream) const override {
    return decode_fixed_payloads<Format>(segments, arguments, stream);
  }

 private:
  uint64_t bucket_;
};

}  // namespace gradwire::cuda
