// raw, bf16 and fp16, whose payloads consist of the values themselves.

#include "codecs/raw/raw.h"
#include "codecs/registry.h"
#include "cuda/fixed/fixed_kernels.cuh"

namespace gradwire::cuda {
namespace {

// Payloads of values without scales, as fixed_decode.cuh takes them. T: the bits of a value.
template <typename T, float (*kWiden)(T)>
struct PlainValues : FixedFormat, NoScales {
  __device__ static uint32_t code(const uint8_t* values, uint32_t at) {
    return load_word<T>(values + sizeof(T) * at);
  }
  __device__ static float value(uint32_t code, uint32_t, Scale) {
    return kWiden(static_cast<T>(code));
  }
};

// T: the bits of a value, as x holds them and as the payload does.
template <typename T>
GW_KERNEL void copy_values(Segments segments, Encoding encoding, const T* x) {
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  if (chunk.of_segment == 0 && threadIdx.x == 0) {
    encoding.encoded[chunk.index].size = chunk.segment.n * sizeof(T);
  }
  const T* from = x + chunk.begin;
  uint8_t* to = encoding.payload(chunk) + chunk.first * sizeof(T);
  for (uint32_t base = threadIdx.x; base < chunk.n; base += kUnrolled * kThreads) {
    T values[kUnrolled];
    load_values<kThreads>(from, base, chunk.n, values);
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      const uint32_t at = base + i * kThreads;
      if (at < chunk.n) store_word(to + sizeof(T) * at, values[i]);
    }
  }
}

class RawKernels final : public CodecKernels {
 public:
  explicit RawKernels(Dtype dtype) : dtype_(dtype) {}

  void encode(Call& call, const EncodeArguments& arguments) const override {
    const Encoding encoding(call, arguments, /*scales=*/0, /*its_places=*/0);
    if (arguments.dtype == Dtype::kFloat32) {
      call.launch(copy_values<uint32_t>, call.segments.chunks, encoding,
                  static_cast<const uint32_t*>(arguments.x_dev));
    } else {
      call.launch(copy_values<uint16_t>, call.segments.chunks, encoding,
                  static_cast<const uint16_t*>(arguments.x_dev));
    }
  }

  void decode(Call& call, const DecodeArguments& arguments) const override {
    switch (dtype_) {
      case Dtype::kFloat32:
        return decode_fixed_payloads<PlainValues<uint32_t, float_of>>(call, arguments);
      case Dtype::kBfloat16:
        return decode_fixed_payloads<PlainValues<uint16_t, widen_bf16>>(call, arguments);
      case Dtype::kFloat16:
        return decode_fixed_payloads<PlainValues<uint16_t, widen_f16>>(call, arguments);
    }
  }

 private:
  Dtype dtype_;
};

// kInfiniteFrom: the magnitude bits that become infinite.
template <uint16_t (*kNarrow)(float), float (*kWiden)(uint16_t), uint32_t kInfiniteFrom>
struct HalfFormat : PlainValues<uint16_t, kWiden> {
  using Scale = NoScales::Scale;
  static constexpr bool kScaledByLargest = false;
  static constexpr uint32_t kLeastInfinite = kInfiniteFrom;

  // Values are refused only if there is a residual.
  static void measure(Call& call, const Encoding& encoding) {
    if (encoding.input.keeps_residual()) measure_magnitudes(call, encoding);
  }
  __device__ static bool sent(const Magnitudes&, uint32_t) { return true; }
  __device__ static Scale scale(const Magnitudes&, uint64_t) { return {}; }
  __device__ static float put(uint8_t* values, uint32_t at, bool there, float b, Scale) {
    const uint16_t half = kNarrow(b);
    if (there) store_word(values + sizeof(half) * at, half);
    return b - kWiden(half);
  }
};

using Bf16Format = HalfFormat<narrow_bf16, widen_bf16, kRoundsToInfinity>;
using Fp16Format = HalfFormat<narrow_f16, widen_f16, kF16RoundsToInfinity>;

}  // namespace

std::unique_ptr<const CodecKernels> kernel_factories::raw(const Codec& codec) {
  return std::make_unique<RawKernels>(parameters_of<RawParameters>(codec)->dtype);
}

std::unique_ptr<const CodecKernels> kernel_factories::bf16(const Codec&) {
  return std::make_unique<FixedKernels<Bf16Format>>();
}

std::unique_ptr<const CodecKernels> kernel_factories::fp16(const Codec&) {
  return std::make_unique<FixedKernels<Fp16Format>>();
}

}  // namespace gradwire::cuda
