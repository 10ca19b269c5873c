#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gradwire/codec.h"
#include "gradwire/execution.h"
#include "gradwire/export.h"
#include "gradwire/status.h"

namespace gradwire {

// A frame is one encoded tensor segment with its header (spec/format.md). It can be decoded alone.
inline constexpr uint64_t kFrameHeaderSize = 32;

// kNonFinite is a marker: the input held NaN or Inf. It has no payload and decodes to NaN
// everywhere.
enum class FrameContent : uint8_t { kValues, kNonFinite };

struct Frame {
  std::shared_ptr<const Codec> codec;
  Dtype dtype = Dtype::kFloat32;  // of the values that were encoded; they decode to float32
  FrameContent content = FrameContent::kValues;
  uint64_t n = 0;
  uint32_t checksum = 0;
  std::span<const std::byte> payload;  // inside the bytes that were parsed
};

struct EncodedFrame {
  uint64_t size = 0;  // bytes
  // kOk, or kNonFinite naming the element. Then the frame is a marker, and the residual is as it
  // was.
  Status non_finite;
};

// The size that encode_frame needs for n values.
[[nodiscard]] GRADWIRE_EXPORT uint64_t max_frame_size(const Codec& codec, uint64_t n) noexcept;

// Encodes x (plus residual) with its header into `frame`.
//   kBufferTooSmall: frame is smaller than max_frame_size; kLimitExceeded; kLengthMismatch.
GRADWIRE_EXPORT Result<EncodedFrame> encode_frame(const Codec& codec, const InputView& x,
                                                  const ResidualView& residual,
                                                  const DrawContext& draw,
                                                  std::span<std::byte> frame, Execution& execution);

// Checks everything but the payload's content, in the order of spec/format.md. It allocates no
// memory in proportion to n.
GRADWIRE_EXPORT Result<Frame> parse_frame(std::span<const std::byte> bytes);

// Stores the decoded values in `out` or adds them to it. kLengthMismatch unless out.size() ==
// frame.n.
GRADWIRE_EXPORT Status decode_frame(const Frame& frame, std::span<float> out, DecodeMode mode,
                                    Execution& execution);

// Decodes to the bits of `dtype`, kBfloat16 or kFloat16. Values are rounded to nearest, ties to
// even; beyond the range they become infinite; a NaN becomes the quiet NaN of its sign. Raw frames
// of that dtype are copied bit for bit.
GRADWIRE_EXPORT Status decode_frame(const Frame& frame, Dtype dtype, std::span<uint16_t> out,
                                    Execution& execution);

}  // namespace gradwire
