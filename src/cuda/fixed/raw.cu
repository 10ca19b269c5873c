#include "base/return_if_error.h"
#include "codecs/raw/raw.h"
#include "codecs/registry.h"
#include "cuda/common/codec_kernels.h"
#include "cuda/common/magnitudes.cuh"
#include "cuda/common/unaligned.cuh"
#include "cuda/fixed/fixed_decode.cuh"

namespace gradwire::cuda {
namespace {

// T: the bits of a value, as x holds them and as the payload does.
template <typename T>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    copy_values(Segments segments, const T* x, uint8_t* payloads, EncodedSegment* encoded) {
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  if (chunk.of_segment == 0 && threadIdx.x == 0) {
    encoded[chunk.index].size = chunk.segment.n * sizeof(T);
  }
  const T* from = x + chunk.begin;
  uint8_t* to = payloads + chunk.segment.payload + chunk.first * sizeof(T);
  for (uint32_t base = threadIdx.x; base < chunk.n; base += kUnrolled * kThreads) {
    T values[kUnrolled] = {};
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      const uint32_t at = base + i * kThreads;
      if (at < chunk.n) values[i] = from[at];
    }
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      const uint32_t at = base + i * kThreads;
      if (at < chunk.n) store_word(to + sizeof(T) * at, values[i]);
    }
  }
}

// What decoding needs of a format (fixed_decode.cuh).
template <typename T, float (*widen)(T)>
struct RawFormat {
  static constexpr uint32_t kScaleBytes = 0;
  static constexpr bool kEmptyIsZero = false;
  static constexpr bool kSparse = false;
  struct Scale {};

  GW_HOST_DEVICE static uint64_t bytes(uint64_t n) { return n * sizeof(T); }
  __device__ static Scale load(const uint8_t*) { return {}; }
  __device__ static uint32_t code(const uint8_t* values, uint32_t at) {
    return load_word<T>(values + bytes(at));
  }
  __device__ static bool valid_code(uint32_t, uint32_t) { return true; }
  __device__ static bool valid_end(uint32_t, uint32_t) { return true; }
  __device__ static float value(uint32_t code, uint32_t, Scale) {
    return widen(static_cast<T>(code));
  }
};

class RawKernels final : public CodecKernels {
 public:
  explicit RawKernels(Dtype dtype) : dtype_(dtype) {}

  uint64_t group_size() const override { return 0; }

  Status encode(const Segments& segments, const EncodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    if (scratch.counts()) return {};
    GW_RETURN_IF_ERROR(launch(clear_magnitudes, blocks_for(segments.count), stream, segments,
                              arguments.encoded_dev, Magnitudes{}));
    auto* payloads = reinterpret_cast<uint8_t*>(arguments.payloads_dev);
    if (arguments.dtype == Dtype::kFloat32) {
      return launch(copy_values<uint32_t>, segments.chunks, stream, segments,
                    static_cast<const uint32_t*>(arguments.x_dev), payloads, arguments.encoded_dev);
    }
    return launch(copy_values<uint16_t>, segments.chunks, stream, segments,
                  static_cast<const uint16_t*>(arguments.x_dev), payloads, arguments.encoded_dev);
  }

  Status decode(const Segments& segments, const DecodeArguments& arguments, ScratchLayout& scratch,
                cudaStream_t stream) const override {
    switch (dtype_) {
      case Dtype::kFloat32:
        return decode_fixed_payloads<RawFormat<uint32_t, float_of>>(segments, arguments, scratch,
                                                                    stream);
      case Dtype::kBfloat16:
        return decode_fixed_payloads<RawFormat<uint16_t, widen_bf16>>(segments, arguments, scratch,
                                                                      stream);
      case Dtype::kFloat16:
        return decode_fixed_payloads<RawFormat<uint16_t, widen_f16>>(segments, arguments, scratch,
                                                                     stream);
    }
    return {};
  }

 private:
  Dtype dtype_;
};

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  return std::make_unique<RawKernels>(parameters_of<RawParameters>(codec)->dtype);
}

}  // namespace

const KernelsFactory kernel_factories::raw = create;

}  // namespace gradwire::cuda
