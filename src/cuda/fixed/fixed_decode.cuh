#pragma once

// Decoding of payloads with one size: the reverse of fixed_kernels.cuh. Any bytes are safe. A
// segment may have several payloads: a thread keeps its values in registers while it adds all of
// them, so the bucket is read and written once. A format says what is special about a codec:
//
//   struct Format {
//     // Scales, as payloads.cuh has them, where kScaleBytes is not 0: an empty payload then stands
//     // for zeros.
//     struct Scale;
//     __device__ Scale load(const uint8_t* scale) const;
//     static constexpr bool kSparse;     // many codes add nothing
//     // The bits that hold value `at`, and what they mean.
//     __device__ uint32_t code(const uint8_t* values, uint32_t at) const;
//     __device__ bool valid_code(uint32_t code, uint32_t at) const;
//     // Whether the bits after the last of n values are 0.
//     __device__ bool valid_end(uint32_t code, uint32_t n) const;
//     __device__ float value(uint32_t code, uint32_t at, Scale scale) const;
//     // Only where kSparse is true; elsewhere a value is added as it is.
//     __device__ bool adds(uint32_t code, uint32_t at) const;  // false: `add` changes no sum
//     __device__ float add(float sum, uint32_t code, uint32_t at, Scale scale) const;
//   };

#include <cstdint>

#include "cuda/common/input.cuh"
#include "cuda/common/payloads.cuh"

namespace gradwire::cuda {

// The defaults of most formats: every code is a value, and most values are not 0.
struct FixedFormat {
  static constexpr bool kSparse = false;

  __device__ static bool valid_code(uint32_t, uint32_t) { return true; }
  __device__ static bool valid_end(uint32_t, uint32_t) { return true; }
};

// Each thread checks one payload.
static GW_KERNEL void check_sizes(Segments segments, Payloads payloads) {
  const uint64_t number = thread_number();
  if (number >= uint64_t{payloads.sources} * segments.count) return;
  const uint64_t size = payloads.places[number].size;
  const bool valid = segments.segments[number % segments.count].may_have(size);
  payloads.decoded[number] = {valid ? 1u : 0u, size == 0 ? 1u : 0u};
  if (payloads.any_scale != nullptr) payloads.any_scale[number] = 0;
}

// The values that a thread handles at once, kThreads apart from `base` on. After the last value of
// a chunk it handles that value again, and does not store it.
struct FixedValues {
  uint32_t at[kUnrolled];
  uint32_t there;  // bit i: the i-th is one of the chunk

  __device__ FixedValues(uint32_t base, uint32_t n) : there(0) {
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      const uint32_t own = base + i * kThreads;
      at[i] = min(own, n - 1);
      there |= static_cast<uint32_t>(own < n) << i;
    }
  }
};

// The codes of these values in one payload.
template <typename Format>
struct FixedCodes {
  const uint8_t* scales = nullptr;  // nullptr: there are none
  typename Format::Scale scale{};   // if the segment has only one
  uint32_t of[kUnrolled] = {};
};

// The chunk that a block decodes, in all payloads of its segment.
template <typename Format>
class FixedChunk {
 public:
  __device__ FixedChunk(const Segments& segments, const Chunk& chunk, const Format& format,
                        const Payloads& payloads)
      : format_(format),
        payloads_(payloads),
        first_(chunk.index),
        stride_(segments.count),
        values_at_(chunk.segment.scales_size +
                   uint64_t{chunk.segment.full_room} * chunk.of_segment),
        n_(chunk.n),
        several_(chunk.segment.scales > 1),
        scale_of_(chunk) {}

  [[nodiscard]] __device__ uint64_t number(uint32_t source) const {
    return first_ + uint64_t{source} * stride_;
  }

  // Refuses payloads whose scales are all 0, or that have bits set after their last value.
  __device__ void check() const {
    for (uint32_t source = threadIdx.x; source < payloads_.sources; source += kThreads) {
      const uint64_t payload = number(source);
      const uint8_t* values = values_of(payload);
      if (values == nullptr) continue;
      bool valid = format_.valid_end(format_.code(values, n_ - 1), n_);
      if constexpr (Format::kScaleBytes > 0) valid = valid && payloads_.any_scale[payload] != 0;
      if (!valid) payloads_.refuse(payload);
    }
  }

  [[nodiscard]] __device__ FixedCodes<Format> read(uint32_t source,
                                                   const FixedValues& values) const {
    FixedCodes<Format> codes;
    const uint8_t* from = values_of(number(source));
    if (from == nullptr) return codes;
    codes.scales = from - values_at_;
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) codes.of[i] = format_.code(from, values.at[i]);
    if (!several_) codes.scale = format_.load(codes.scales);
    return codes;
  }

  // Stores the values of the codes, or adds them. false: a code is wrong.
  template <DecodeMode kMode>
  __device__ bool put(const FixedCodes<Format>& codes, const FixedValues& values,
                      float (&sums)[kUnrolled]) const {
    bool valid = true;
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      const uint32_t code = codes.of[i];
      const uint32_t at = values.at[i];
      valid &= format_.valid_code(code, at);
      typename Format::Scale scale = codes.scale;
      if (several_)
        scale = format_.load(codes.scales + scale_of_(worked_out_anew(at)) * Format::kScaleBytes);
      if constexpr (kMode == DecodeMode::kStore) {
        sums[i] = format_.value(code, at, scale);
      } else if constexpr (Format::kSparse) {
        sums[i] = format_.add(sums[i], code, at, scale);
      } else {
        sums[i] += format_.value(code, at, scale);
      }
    }
    return valid;
  }

  // Bit i: the codes change the i-th sum.
  [[nodiscard]] __device__ uint32_t changed(const FixedCodes<Format>& codes,
                                            const FixedValues& values) const {
    uint32_t bits = 0;
    if (codes.scales == nullptr) return bits;
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      bits |= static_cast<uint32_t>(format_.adds(codes.of[i], values.at[i])) << i;
    }
    return bits;
  }

 private:
  // Returns where the chunk's values begin in a payload; nullptr: there is nothing to decode.
  [[nodiscard]] __device__ const uint8_t* values_of(uint64_t payload) const {
    const PayloadPlace place = payloads_.places[payload];
    if (place.size == 0 || payloads_.decoded[payload].valid == 0) return nullptr;
    return payloads_.bytes + place.begin + values_at_;
  }

  const Format& format_;
  const Payloads& payloads_;
  uint64_t first_;
  uint64_t stride_;
  uint64_t values_at_;  // of the chunk, in a payload
  uint32_t n_;
  bool several_;
  ScaleOf scale_of_;
};

// Decodes a chunk's values. A wrong code refuses the payload; no thread waits for another here.
template <typename Format>
GW_KERNEL void decode_fixed(Segments segments, Format format, Payloads payloads) {
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const FixedChunk<Format> fixed(segments, chunk, format, payloads);
  fixed.check();
  const bool adds = payloads.mode == DecodeMode::kAdd;
  const bool divided = divides(payloads.divisor);
  // Sums that do not change are not written.
  [[maybe_unused]] const bool sparse = adds && payloads.sources == 1 && !divided;
  float* to = payloads.out + chunk.begin;
  for (uint32_t base = threadIdx.x; base < chunk.n; base += kUnrolled * kThreads) {
    const FixedValues values(base, chunk.n);
    uint32_t which = values.there;
    if constexpr (Format::kSparse) {
      if (sparse) which &= fixed.changed(fixed.read(0, values), values);
    }
    float sums[kUnrolled] = {};
    if (adds) {
#pragma unroll
      for (uint32_t i = 0; i < kUnrolled; ++i) {
        if ((which >> i & 1) != 0) sums[i] = to[values.at[i]];
      }
    }
    for (uint32_t source = 0; source < payloads.sources; ++source) {
      const FixedCodes<Format> codes = fixed.read(source, values);
      if (codes.scales == nullptr) continue;
      const bool valid = !adds && source == 0
                             ? fixed.template put<DecodeMode::kStore>(codes, values, sums)
                             : fixed.template put<DecodeMode::kAdd>(codes, values, sums);
      if (!valid) payloads.refuse(fixed.number(source));
    }
#pragma unroll
    for (uint32_t i = 0; i < kUnrolled; ++i) {
      if ((which >> i & 1) == 0) continue;
      to[values.at[i]] = divided ? sums[i] / payloads.divisor : sums[i];
    }
  }
}

// Queues the decoding of all payloads.
template <typename Format>
void decode_fixed_payloads(Call& call, const DecodeArguments& arguments,
                           const Format& format = {}) {
  const uint64_t count = uint64_t{arguments.sources} * call.segments.count;
  const Payloads payloads(call, arguments, Format::kScaleBytes > 0 ? count : 0);
  call.launch(check_sizes, blocks_for(count), payloads);
  queue_check_scales(call, format, payloads);
  call.launch(decode_fixed<Format>, call.segments.chunks, format, payloads);
}

}  // namespace gradwire::cuda
