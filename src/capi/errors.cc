// The thread's last error.

#include <new>
#include <string>

#include "gradwire/gradwire.h"
#include "gradwire/status.h"

using gradwire::StatusCode;

namespace {

// Both are set together; last_fixed_message, which needs no memory, takes precedence.
thread_local std::string last_message;
thread_local const char* last_fixed_message = nullptr;

constexpr bool same(gw_status c, StatusCode cpp) {
  return static_cast<unsigned>(c) == static_cast<unsigned>(cpp);
}

static_assert(same(GW_OK, StatusCode::kOk));
static_assert(same(GW_INVALID_ARGUMENT, StatusCode::kInvalidArgument));
static_assert(same(GW_UNKNOWN_CODEC, StatusCode::kUnknownCodec));
static_assert(same(GW_BAD_PARAMETER, StatusCode::kBadParameter));
static_assert(same(GW_UNSUPPORTED_DTYPE, StatusCode::kUnsupportedDtype));
static_assert(same(GW_BUFFER_TOO_SMALL, StatusCode::kBufferTooSmall));
static_assert(same(GW_TRUNCATED, StatusCode::kTruncated));
static_assert(same(GW_BAD_MAGIC, StatusCode::kBadMagic));
static_assert(same(GW_UNSUPPORTED_VERSION, StatusCode::kUnsupportedVersion));
static_assert(same(GW_RESERVED_BITS, StatusCode::kReservedBits));
static_assert(same(GW_CHECKSUM_MISMATCH, StatusCode::kChecksumMismatch));
static_assert(same(GW_CORRUPT_PAYLOAD, StatusCode::kCorruptPayload));
static_assert(same(GW_TRAILING_BYTES, StatusCode::kTrailingBytes));
static_assert(same(GW_LIMIT_EXCEEDED, StatusCode::kLimitExceeded));
static_assert(same(GW_NON_FINITE, StatusCode::kNonFinite));
static_assert(same(GW_PEER_MISMATCH, StatusCode::kPeerMismatch));
static_assert(same(GW_UNEXPECTED_MESSAGE, StatusCode::kUnexpectedMessage));
static_assert(same(GW_LENGTH_MISMATCH, StatusCode::kLengthMismatch));
static_assert(same(GW_PEER_LOST, StatusCode::kPeerLost));
static_assert(same(GW_DEVICE_ERROR, StatusCode::kDeviceError));

}  // namespace

extern "C" {

#define GW_QUOTE(x) #x
#define GW_TEXT(x) GW_QUOTE(x)
const char* gw_version() {
  return GW_TEXT(GW_VERSION_MAJOR) "." GW_TEXT(GW_VERSION_MINOR) "." GW_TEXT(GW_VERSION_PATCH);
}
#undef GW_TEXT
#undef GW_QUOTE

const char* gw_strerror(gw_status status) {
  if (status == GW_OUT_OF_MEMORY) return "out_of_memory";
  if (status == GW_INTERNAL_ERROR) return "internal_error";
  const auto number = static_cast<unsigned>(status);
  if (number > UINT8_MAX) return "unknown_status";
  return gradwire::status_name(static_cast<StatusCode>(number)).data();
}

gw_status gw_set_last_error(gw_status status, const char* message) {
  if (status == GW_OK) return GW_OK;
  if (message == nullptr) return gw_set_last_error(GW_INVALID_ARGUMENT, "message is NULL");
  last_fixed_message = nullptr;
  try {
    last_message = message;
  } catch (const std::bad_alloc&) {
    last_fixed_message = "out of memory";
  }
  return status;
}

const char* gw_last_error_message() {
  return last_fixed_message != nullptr ? last_fixed_message : last_message.c_str();
}

}  // extern "C"
