#include "gradwire/status.h"

namespace gradwire {

std::string_view status_name(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid_argument";
    case StatusCode::kUnknownCodec:
      return "unknown_codec";
    case StatusCode::kBadParameter:
      return "bad_parameter";
    case StatusCode::kUnsupportedDtype:
      return "unsupported_dtype";
    case StatusCode::kBufferTooSmall:
      return "buffer_too_small";
    case StatusCode::kTruncated:
      return "truncated";
    case StatusCode::kBadMagic:
      return "bad_magic";
    case StatusCode::kUnsupportedVersion:
      return "unsupported_version";
    case StatusCode::kReservedBits:
      return "reserved_bits";
    case StatusCode::kChecksumMismatch:
      return "checksum_mismatch";
    case StatusCode::kCorruptPayload:
      return "corrupt_payload";
    case StatusCode::kTrailingBytes:
      return "trailing_bytes";
    case StatusCode::kLimitExceeded:
      return "limit_exceeded";
    case StatusCode::kNonFinite:
      return "non_finite";
    case StatusCode::kPeerMismatch:
      return "peer_mismatch";
    case StatusCode::kUnexpectedMessage:
      return "unexpected_message";
    case StatusCode::kLengthMismatch:
      return "length_mismatch";
    case StatusCode::kPeerLost:
      return "peer_lost";
    case StatusCode::kDeviceError:
      return "device_error";
  }
  return "unknown_status";
}

}  // namespace gradwire
