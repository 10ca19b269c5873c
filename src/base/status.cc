#include "gradwire/status.h"

#include <iterator>

namespace gradwire {
namespace {

// The index is the StatusCode.
constexpr std::string_view kNames[] = {"ok",
                                       "invalid_argument",
                                       "unknown_codec",
                                       "bad_parameter",
                                       "unsupported_dtype",
                                       "buffer_too_small",
                                       "truncated",
                                       "bad_magic",
                                       "unsupported_version",
                                       "reserved_bits",
                                       "checksum_mismatch",
                                       "corrupt_payload",
                                       "trailing_bytes",
                                       "limit_exceeded",
                                       "non_finite",
                                       "peer_mismatch",
                                       "unexpected_message",
                                       "length_mismatch",
                                       "peer_lost",
                                       "device_error"};
static_assert(std::size(kNames) == static_cast<size_t>(StatusCode::kDeviceError) + 1);

}  // namespace

std::string_view status_name(StatusCode code) noexcept {
  const auto number = static_cast<size_t>(code);
  return number < std::size(kNames) ? kNames[number] : "unknown_status";
}

}  // namespace gradwire
