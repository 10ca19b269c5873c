#include "cuda/fixed/fixed_kernels.cuh"
#include "cuda/fixed/sign_sums.cuh"

namespace gradwire::cuda {
namespace {

struct OneBitFormat : FixedFormat {
  static constexpr uint32_t kScaleBytes = 2 * sizeof(float);
  static constexpr bool kScaledByLargest = false;
  static constexpr uint32_t kLeastInfinite = kNonFiniteBits;
  using Scale = SignMeans;

  SignScratch scratch{};

  void measure(Call& call, const Encoding& encoding) {
    scratch = {.sums = call.take<PartSums>(uint64_t{call.segments.chunks} + call.segments.scales),
               .means = call.take<SignMeans>(call.segments.scales),
               .anything = call.take<uint32_t>(call.segments.count)};
    call.launch(sum_signs, call.segments.chunks, encoding, scratch);
    call.launch(find_means, call.segments.chunks, scratch);
  }

  __device__ bool sent(const Magnitudes&, uint32_t index) const {
    return scratch.anything[index] != 0;
  }
  __device__ Scale scale(const Magnitudes&, uint64_t of_call) const {
    return scratch.means[of_call];
  }
  __device__ static void store(Scale means, uint8_t* at) {
    store_word(at, bits_of(means.positive));
    store_word(at + sizeof(float), bits_of(means.negative));
  }
  // Each warp writes one word.
  __device__ static float put(uint8_t* values, uint32_t at, bool there, float b, Scale means) {
    const bool below = b < 0.0f;
    const uint32_t signs = __ballot_sync(kAllLanes, there && below);
    const uint32_t here = __ballot_sync(kAllLanes, there);
    if (lane() == 0) {
      uint8_t* to = values + at / 8;
      if (here == kAllLanes) {
        store_word(to, signs);
      } else {
        const auto size = static_cast<uint32_t>(sign_bytes(static_cast<uint32_t>(__popc(here))));
        for (uint32_t i = 0; i < size; ++i) to[i] = static_cast<uint8_t>(signs >> 8 * i);
      }
    }
    return b - means.of(below);
  }

  __device__ static bool valid(const uint8_t* scale, bool& any) {
    const SignMeans means = load(scale);
    any = means.positive != 0.0f || means.negative != 0.0f;
    const bool negative_fits = bits_of(means.negative) == 0 || means.negative < 0.0f;
    return bits_of(means.positive) < kNonFiniteBits && negative_fits &&
           magnitude_bits(means.negative) < kNonFiniteBits;
  }
  __device__ static Scale load(const uint8_t* at) {
    return {float_of(load_word<uint32_t>(at)), float_of(load_word<uint32_t>(at + sizeof(float)))};
  }
  __device__ static uint32_t code(const uint8_t* values, uint32_t at) { return values[at / 8]; }
  // The bits after the last sign are 0.
  __device__ static bool valid_end(uint32_t code, uint32_t n) {
    return n % 8 == 0 || code >> n % 8 == 0;
  }
  __device__ static float value(uint32_t code, uint32_t at, Scale means) {
    return means.of((code >> at % 8 & 1) != 0);
  }
};

}  // namespace

std::unique_ptr<const CodecKernels> kernel_factories::onebit(const Codec&) {
  return std::make_unique<FixedKernels<OneBitFormat>>();
}

}  // namespace gradwire::cuda
