#include "codecs/int8/int8.h"
#include "codecs/registry.h"
#include "cuda/common/unaligned.cuh"
#include "cuda/fixed/fixed_kernels.cuh"
#include "stages/int8/int8_rounding.h"

namespace gradwire::cuda {
namespace {

struct Int8Format {
  static constexpr uint32_t kScaleBytes = sizeof(float);
  static constexpr bool kEmptyIsZero = true;
  static constexpr bool kSparse = false;
  static constexpr uint32_t kLeastInfinite = kNonFiniteBits;
  using Scale = float;  // the unit

  Magnitudes magnitudes{};

  void take_scratch(const Segments& segments, ScratchLayout& layout) {
    magnitudes = {.of_scale = layout.take<uint32_t>(segments.scales),
                  .of_segment = layout.take<uint32_t>(segments.count)};
  }
  [[nodiscard]] Status prepare(const Segments& segments, const Input& input,
                               EncodedSegment* encoded, cudaStream_t stream) const {
    return measure(segments, input, encoded, magnitudes, stream);
  }

  GW_HOST_DEVICE static uint64_t bytes(uint64_t n) { return n; }
  __device__ bool refused(uint32_t index) const {
    return magnitudes.of_segment[index] >= kNonFiniteBits;
  }
  __device__ bool sent(uint32_t index) const {
    return int8_unit(magnitudes.of_segment[index]) != 0.0f;
  }
  __device__ Scale scale(uint64_t of_call) const { return int8_unit(magnitudes.of_scale[of_call]); }
  __device__ static void store(Scale unit, uint8_t* at) { store_word(at, bits_of(unit)); }
  __device__ static float put(uint8_t* values, uint32_t at, bool there, float b, Scale unit) {
    const int8_t q = quantize_int8(b, unit);
    if (there) values[at] = static_cast<uint8_t>(q);
    return b - int8_value(q, unit);
  }

  __device__ static bool valid(const uint8_t* scale, bool& any) {
    const auto bits = load_word<uint32_t>(scale);
    any = bits != 0;
    return bits <= kLargestInt8UnitBits;
  }
  __device__ static Scale load(const uint8_t* at) { return float_of(load_word<uint32_t>(at)); }
  __device__ static uint32_t code(const uint8_t* values, uint32_t at) { return values[at]; }
  __device__ static bool valid_code(uint32_t code, uint32_t) {
    return static_cast<int8_t>(code) >= -kInt8Levels;
  }
  __device__ static bool valid_end(uint32_t, uint32_t) { return true; }
  __device__ static float value(uint32_t code, uint32_t, Scale unit) {
    return int8_value(static_cast<int8_t>(code), unit);
  }
};

std::unique_ptr<const CodecKernels> create(const Codec& codec) {
  return std::make_unique<FixedKernels<Int8Format>>(
      parameters_of<Int8Parameters>(codec)->group_size);
}

}  // namespace

const KernelsFactory kernel_factories::int8 = create;

}  // namespace gradwire::cuda
