#pragma once

// The kernels of a codec whose payloads have one size, put together.

#include <cstdint>

#include "base/return_if_error.h"
#include "cuda/common/codec_kernels.h"
#include "cuda/fixed/fixed_decode.cuh"
#include "cuda/fixed/fixed_encode.cuh"

namespace gradwire::cuda {

template <typename Format>
class FixedKernels final : public CodecKernels {
 public:
  explicit FixedKernels(uint64_t group_size) : group_size_(group_size) {}

  uint64_t group_size() const override { return group_size_; }

  Status encode(const Segments& segments, const EncodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    Format format;
    format.take_scratch(segments, scratch);
    if (scratch.counts()) return {};
    const Input input(arguments);
    GW_RETURN_IF_ERROR(format.prepare(segments, input, arguments.encoded_dev, stream));
    return launch(encode_fixed<Format>, segments.chunks, stream, segments, input, format,
                  reinterpret_cast<uint8_t*>(arguments.payloads_dev), arguments.encoded_dev);
  }

  Status decode(const Segments& segments, const DecodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    return decode_fixed_payloads<Format>(segments, arguments, scratch, stream);
  }

 private:
  uint64_t group_size_;
};

}  // namespace gradwire::cuda
