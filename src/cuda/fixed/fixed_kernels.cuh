#pragma once

// A codec whose payloads have one size: a head with the scales, and the values, each in the same
// number of bits (spec/format.md). Each block encodes one chunk. A format says what is special
// about a codec, beside what fixed_decode.cuh asks for:
//
//   struct Format {
//     static constexpr bool kScaledByLargest;    // whether scales are made of largest magnitudes
//     static constexpr uint32_t kLeastInfinite;  // magnitude bits that are refused from here on
//     // On the host: takes its own scratch memory, and queues the kernels of the first pass.
//     void measure(Call& call, const Encoding& encoding);
//     // What the first pass has found.
//     __device__ bool sent(const Magnitudes& magnitudes, uint32_t index) const;  // of a segment
//     __device__ Scale scale(const Magnitudes& magnitudes, uint64_t of_call) const;
//     __device__ static void store(Scale scale, uint8_t* at);
//     // Writes value `at` (if `there`) and returns its residual. All lanes of a warp call it
//     // together.
//     __device__ static float put(uint8_t* values, uint32_t at, bool there, float b, Scale scale);
//   };

#include <cstdint>

#include "cuda/common/magnitudes.cuh"
#include "cuda/fixed/fixed_decode.cuh"

namespace gradwire::cuda {

template <typename Format>
GW_KERNEL void encode_fixed(Segments segments, Encoding encoding, Format format) {
  const Chunk chunk = Chunk::create(segments, blockIdx.x);
  const Segment& segment = chunk.segment;
  const Magnitudes& magnitudes = encoding.magnitudes;
  if (encoding.refuse(chunk, Format::kLeastInfinite)) return;
  // Where nothing is sent, the residual still becomes b.
  const bool sent = format.sent(magnitudes, chunk.index);
  if (!sent && !encoding.input.keeps_residual()) return;
  if (sent && chunk.of_segment == 0 && threadIdx.x == 0) {
    encoding.encoded[chunk.index].size = segment.largest_size;
  }
  uint8_t* payload = encoding.payload(chunk);
  uint8_t* values = payload + segment.scales_size + uint64_t{segment.full_room} * chunk.of_segment;
  const ScaleOf scale_of(chunk);
  auto scale = format.scale(magnitudes, segment.first_scale);
  encoding.input.replace(
      chunk.begin, chunk.n, [](uint32_t) {},
      [&](uint32_t, uint32_t at, float b) {
        if (segment.scales > 1 && at < chunk.n) {
          scale = format.scale(magnitudes, segment.first_scale + scale_of(at));
        }
        return Format::put(values, at, at < chunk.n, b, scale);
      });
  if constexpr (Format::kScaleBytes > 0) {
    const uint64_t end = chunk.end_scale();
    for (uint64_t i = chunk.first_scale() + threadIdx.x; i < end; i += kThreads) {
      Format::store(format.scale(magnitudes, segment.first_scale + i),
                    payload + i * Format::kScaleBytes);
    }
  }
}

template <typename Format>
class FixedKernels final : public CodecKernels {
 public:
  void encode(Call& call, const EncodeArguments& arguments) const override {
    const Encoding encoding(call, arguments, Format::kScaledByLargest ? call.segments.scales : 0,
                            /*its_places=*/0);
    Format format;
    format.measure(call, encoding);
    call.launch(encode_fixed<Format>, call.segments.chunks, encoding, format);
  }

  void decode(Call& call, const DecodeArguments& arguments) const override {
    decode_fixed_payloads<Format>(call, arguments);
  }
};

}  // namespace gradwire::cuda
