#pragma once

// Encoding and decoding on an NVIDIA GPU, with the same bytes as on the CPU. These functions exist
// in builds with CUDA (CMake option GRADWIRE_CUDA).
//
// Pointers whose names end in _dev point to device memory. The caller owns all memory and the
// stream: no call here allocates device memory, copies, or waits for the device. Kernels write
// sizes and errors to device memory.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/export.h"
#include "gradwire/status.h"

namespace gradwire::cuda {

// A tensor's place in the bucket, the array that one call encodes or decodes.
struct BucketSegment {
  uint64_t offset = 0;  // of its first value
  uint64_t n = 0;
  uint64_t stream = 0;  // its draw stream, added to that of the DrawContext
};

// The result of encoding a segment.
struct EncodedSegment {
  static constexpr uint64_t kFinite = ~uint64_t{0};

  uint64_t size;        // bytes of its payload; 0 if the input is not finite
  uint64_t non_finite;  // its first value for which x + residual is NaN or Inf, or kFinite
};

// Where the payload of a segment lies in the received bytes.
struct PayloadPlace {
  uint64_t begin;
  uint64_t size;
};

// The result of decoding a payload.
struct DecodedSegment {
  uint32_t valid;  // 0: the payload is corrupt, and its segment's values are unspecified
  uint32_t empty;  // 1: the payload is empty, so all values are +0
};

struct EncodeArguments {
  const std::byte* table_dev = nullptr;  // a copy of BucketCodec::table()
  Dtype dtype = Dtype::kFloat32;
  const void* x_dev = nullptr;  // the bucket, aligned to its dtype
  ResidualType residual_type = ResidualType::kNone;
  void* residual_dev = nullptr;           // as long as the bucket, or nullptr for kNone
  DrawContext draw;                       // by value: a captured graph repeats the same draws
  std::byte* payloads_dev = nullptr;      // payloads_size() bytes
  EncodedSegment* encoded_dev = nullptr;  // one for each segment
  std::byte* scratch_dev = nullptr;       // encode_scratch_size() bytes, aligned to 8
};

// Places and results are ordered by source: first those of every segment's first payload.
struct DecodeArguments {
  const std::byte* table_dev = nullptr;
  const std::byte* payloads_dev = nullptr;
  const PayloadPlace* places_dev = nullptr;  // sources * segments, within payloads_dev
  uint32_t sources = 1;                      // payloads of each segment, added in this order
  float* out_dev = nullptr;                  // the bucket
  DecodeMode mode = DecodeMode::kStore;      // of the first payload; the others are added to it
  float divisor = 0;                         // of the sum, in float32; 0 or 1: none
  DecodedSegment* decoded_dev = nullptr;     // sources * segments
  std::byte* scratch_dev = nullptr;          // decode_scratch_size(sources) bytes, aligned to 8
};

class CodecKernels;

// A codec for all segments of a bucket: one launch handles all of them, however small they are.
// Immutable; one object serves all threads and streams.
class GRADWIRE_EXPORT BucketCodec {
 public:
  // kLimitExceeded: there are 2^31 or more chunks of 40960 values, or 2^32 or more scales. (Some
  // kernels take only 2^31 / 5 chunks; encode then returns kDeviceError.) kInvalidArgument: a
  // segment has more values than kMaxNumel.
  static Result<BucketCodec> create(std::shared_ptr<const Codec> codec,
                                    std::span<const BucketSegment> segments);
  BucketCodec(BucketCodec&&) noexcept;
  BucketCodec& operator=(BucketCodec&&) noexcept;
  ~BucketCodec();

  [[nodiscard]] const Codec& codec() const noexcept { return *codec_; }
  // The segments, for the kernels; the caller copies this to the device once, to an address aligned
  // to 8.
  [[nodiscard]] std::span<const std::byte> table() const noexcept { return table_; }
  [[nodiscard]] uint64_t encode_scratch_size() const noexcept;
  [[nodiscard]] uint64_t decode_scratch_size(uint32_t sources = 1) const noexcept;
  // Whether a payload has either its largest size or 0. Then the host can send payloads without
  // reading their sizes.
  [[nodiscard]] bool has_fixed_sizes() const noexcept { return fixed_sizes_; }
  // The size of payloads_dev, in which each segment has room for its largest payload.
  [[nodiscard]] uint64_t payloads_size() const noexcept { return payloads_size_; }
  [[nodiscard]] uint64_t payload_offset(size_t segment) const { return payload_offsets_[segment]; }

  // Queues the kernels, which do for each segment what Codec::encode does. A non-finite segment
  // keeps its residual as it was. kDeviceError if CUDA refuses a launch, also after a kernel of an
  // earlier call has failed.
  Status encode(const EncodeArguments& arguments, cudaStream_t stream) const;
  // Queues the kernels, which do what Codec::decode does, once for each source. Any bytes are safe.
  // One pass over the bucket adds all sources if the codec's values have fixed places (raw, bf16,
  // fp16, int8, onebit, qsgd with coder=fixed, trits with coder=none or pack=2bit). Other codecs
  // need a pass for each source, and one to divide. The values of a segment are unspecified if one
  // of its payloads is corrupt. kInvalidArgument: no sources.
  Status decode(const DecodeArguments& arguments, cudaStream_t stream) const;

 private:
  BucketCodec();

  std::shared_ptr<const Codec> codec_;
  std::unique_ptr<const CodecKernels> kernels_;
  std::vector<std::byte> table_;
  std::vector<uint64_t> payload_offsets_;
  uint64_t payloads_size_ = 0;
  bool fixed_sizes_ = true;
  uint64_t segments_ = 0;
  uint64_t chunks_ = 0;
  uint64_t scales_ = 0;
};

}  // namespace gradwire::cuda
