#include "gradwire/frame.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "base/checksum.h"
#include "base/endian.h"
#include "base/return_if_error.h"
#include "base/standard_arithmetic.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

constexpr std::byte kMagic[2] = {std::byte{'G'}, std::byte{'W'}};
constexpr uint8_t kVersion = 1;
constexpr uint8_t kNonFiniteFlag = 1;
constexpr size_t kNarrowValues = 40960;  // in each part that a thread narrows

// Offsets of the header's fields.
constexpr size_t kVersionAt = 2;
constexpr size_t kCodecAt = 3;
constexpr size_t kDtypeAt = 4;
constexpr size_t kFlagsAt = 5;
constexpr size_t kParamAAt = 6;
constexpr size_t kCountAt = 8;
constexpr size_t kParamBAt = 16;
constexpr size_t kChecksumAt = 20;
constexpr size_t kPayloadSizeAt = 24;

uint32_t checksum_of(std::span<const std::byte> frame) {
  return checksum32(frame.first(kChecksumAt), frame.subspan(kPayloadSizeAt));
}

Status reserved(const char* what) {
  return {StatusCode::kReservedBits, std::string("frame: ") + what};
}

Status check_room(const Frame& frame, uint64_t n) {
  if (n == frame.n) return {};
  return {StatusCode::kLengthMismatch, "the frame holds " + std::to_string(frame.n) +
                                           " values, the output has room for " + std::to_string(n)};
}

}  // namespace

uint64_t max_frame_size(const Codec& codec, uint64_t n) noexcept {
  return kFrameHeaderSize + codec.max_payload_size(n);
}

Result<EncodedFrame> encode_frame(const Codec& codec, const InputView& x,
                                  const ResidualView& residual, const DrawContext& draw,
                                  std::span<std::byte> frame, Execution& execution) {
  if (frame.size() < kFrameHeaderSize) {
    return Status(StatusCode::kBufferTooSmall, "a frame needs room for its header of 32 bytes");
  }
  EncodedFrame encoded;
  uint64_t payload_size = 0;
  Result<uint64_t> payload =
      codec.encode(x, residual, draw, frame.subspan(kFrameHeaderSize), execution);
  if (payload.ok()) {
    payload_size = payload.value();
  } else if (payload.status().code() == StatusCode::kNonFinite) {
    encoded.non_finite = payload.status();
  } else {
    return payload.status();
  }
  encoded.size = kFrameHeaderSize + payload_size;

  const WireCodec wire = codec.wire();
  std::byte* header = frame.data();
  std::copy(std::begin(kMagic), std::end(kMagic), header);
  store_le(header + kVersionAt, kVersion);
  store_le(header + kCodecAt, wire.id);
  store_le(header + kDtypeAt, static_cast<uint8_t>(x.dtype()));
  store_le(header + kFlagsAt, encoded.non_finite.ok() ? uint8_t{0} : kNonFiniteFlag);
  store_le(header + kParamAAt, wire.param_a);
  store_le(header + kCountAt, uint64_t{x.size()});
  store_le(header + kParamBAt, wire.param_b);
  store_le(header + kPayloadSizeAt, payload_size);
  store_le(header + kChecksumAt, checksum_of(frame.first(encoded.size)));
  return encoded;
}

Result<Frame> parse_frame(std::span<const std::byte> bytes) {
  if (bytes.size() < kFrameHeaderSize) {
    return Status(StatusCode::kTruncated,
                  "frame: " + std::to_string(bytes.size()) + " bytes are less than a header of 32");
  }
  const std::byte* header = bytes.data();
  if (!std::equal(std::begin(kMagic), std::end(kMagic), header)) {
    return Status(StatusCode::kBadMagic, "not a gradwire frame: it does not start with 'GW'");
  }
  if (const auto version = load_le<uint8_t>(header + kVersionAt); version != kVersion) {
    return Status(StatusCode::kUnsupportedVersion,
                  "frame: version " + std::to_string(version) + "; this build reads version 1");
  }
  const auto flags = load_le<uint8_t>(header + kFlagsAt);
  if ((flags & ~kNonFiniteFlag) != 0) return reserved("reserved flags are set");

  const WireCodec wire = {.id = load_le<uint8_t>(header + kCodecAt),
                          .param_a = load_le<uint16_t>(header + kParamAAt),
                          .param_b = load_le<uint32_t>(header + kParamBAt)};
  const auto dtype = load_le<uint8_t>(header + kDtypeAt);
  Result<std::shared_ptr<const Codec>> codec = Codec::from_wire(wire, static_cast<Dtype>(dtype));
  if (!codec.ok() && codec.status().code() == StatusCode::kUnknownCodec) return codec.status();
  if (dtype > static_cast<uint8_t>(Dtype::kFloat16)) {
    return Status(StatusCode::kUnsupportedDtype,
                  "frame: dtype " + std::to_string(dtype) +
                      "; this build reads 0 (float32), 1 (bfloat16) and 2 (float16)");
  }
  const auto n = load_le<uint64_t>(header + kCountAt);
  if (n > kMaxNumel) {
    return Status(StatusCode::kLimitExceeded,
                  "frame: " + std::to_string(n) + " values are more than the limit of 2^40");
  }
  const auto payload_size = load_le<uint64_t>(header + kPayloadSizeAt);
  const uint64_t present = bytes.size() - kFrameHeaderSize;
  if (present < payload_size) {
    return Status(StatusCode::kTruncated, "frame: the payload has " + std::to_string(payload_size) +
                                              " bytes, " + std::to_string(present) + " are there");
  }
  if (present > payload_size) {
    return Status(StatusCode::kTrailingBytes, std::to_string(present - payload_size) +
                                                  " bytes follow the frame's payload of " +
                                                  std::to_string(payload_size));
  }
  const auto checksum = load_le<uint32_t>(header + kChecksumAt);
  if (checksum != checksum_of(bytes)) {
    return Status(StatusCode::kChecksumMismatch, "frame: the checksum does not match the content");
  }
  if (!codec.ok()) return codec.status();
  const auto content =
      (flags & kNonFiniteFlag) != 0 ? FrameContent::kNonFinite : FrameContent::kValues;
  if (content == FrameContent::kNonFinite) {
    if (payload_size != 0) {
      return Status(StatusCode::kCorruptPayload, "frame: a non-finite marker has a payload");
    }
  } else {
    GW_RETURN_IF_ERROR(codec.value()->check_size(n, payload_size));
  }
  return Frame{.codec = std::move(codec).value(),
               .dtype = static_cast<Dtype>(dtype),
               .content = content,
               .n = n,
               .checksum = checksum,
               .payload = bytes.subspan(kFrameHeaderSize)};
}

Status decode_frame(const Frame& frame, std::span<float> out, DecodeMode mode,
                    Execution& execution) {
  GW_RETURN_IF_ERROR(check_room(frame, out.size()));
  if (frame.content == FrameContent::kNonFinite) {
    std::fill(out.begin(), out.end(), std::numeric_limits<float>::quiet_NaN());
    return {};
  }
  return frame.codec->decode(frame.payload, out, mode, execution);
}

Status decode_frame(const Frame& frame, Dtype dtype, std::span<uint16_t> out,
                    Execution& execution) {
  const StandardArithmetic arithmetic;
  if (dtype != Dtype::kBfloat16 && dtype != Dtype::kFloat16) {
    return {StatusCode::kUnsupportedDtype, "values of 16 bits are bfloat16 or float16"};
  }
  GW_RETURN_IF_ERROR(check_room(frame, out.size()));
  const bool holds_bits = frame.dtype == dtype && frame.codec->info().lossless;
  if (holds_bits && frame.content == FrameContent::kValues) {
    if (!out.empty()) std::memcpy(out.data(), frame.payload.data(), frame.payload.size());
    return {};
  }
  const auto decoded = std::make_unique_for_overwrite<float[]>(out.size());
  GW_RETURN_IF_ERROR(
      decode_frame(frame, {decoded.get(), out.size()}, DecodeMode::kStore, execution));
  const Kernels& kernels = execution.kernels();
  const auto narrow = dtype == Dtype::kBfloat16 ? kernels.narrow_bf16 : kernels.narrow_f16;
  execution.for_each((out.size() + kNarrowValues - 1) / kNarrowValues, [&](size_t part) {
    const size_t begin = part * kNarrowValues;
    narrow(decoded.get() + begin, std::min<size_t>(kNarrowValues, out.size() - begin),
           out.data() + begin);
  });
  return {};
}

}  // namespace gradwire
