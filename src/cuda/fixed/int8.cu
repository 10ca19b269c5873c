#include "cuda/fixed/fixed_kernels.cuh"
#include "stages/int8/int8_rounding.h"

namespace gradwire::cuda {
namespace {

// The scales are units.
struct Int8Format : FixedFormat, FloatScales {
  static constexpr bool kScaledByLargest = true;
  static constexpr uint32_t kLeastInfinite = kNonFiniteBits;

  static void measure(Call& call, const Encoding& encoding) { measure_magnitudes(call, encoding); }

  __device__ static bool sent(const Magnitudes& magnitudes, uint32_t index) {
    return int8_unit(magnitudes.of_segment[index]) != 0.0f;
  }
  __device__ static Scale scale(const Magnitudes& magnitudes, uint64_t of_call) {
    return int8_unit(magnitudes.of_scale[of_call]);
  }
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
  __device__ static uint32_t code(const uint8_t* values, uint32_t at) { return values[at]; }
  __device__ static bool valid_code(uint32_t code, uint32_t) {
    return static_cast<int8_t>(code) >= -kInt8Levels;
  }
  __device__ static float value(uint32_t code, uint32_t, Scale unit) {
    return int8_value(static_cast<int8_t>(code), unit);
  }
};

}  // namespace

std::unique_ptr<const CodecKernels> kernel_factories::int8(const Codec&) {
  return std::make_unique<FixedKernels<Int8Format>>();
}

}  // namespace gradwire::cuda
