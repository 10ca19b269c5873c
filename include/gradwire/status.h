#pragma once

#include <cassert>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "gradwire/export.h"

namespace gradwire {

// Why a call failed. The numbers never change: they are in spec/format.md and in golden files.
enum class StatusCode : uint8_t {
  kOk = 0,
  kInvalidArgument = 1,
  kUnknownCodec = 2,
  kBadParameter = 3,
  kUnsupportedDtype = 4,
  kBufferTooSmall = 5,
  kTruncated = 6,
  kBadMagic = 7,
  kUnsupportedVersion = 8,
  kReservedBits = 9,
  kChecksumMismatch = 10,
  kCorruptPayload = 11,
  kTrailingBytes = 12,
  kLimitExceeded = 13,
  kNonFinite = 14,
  kPeerMismatch = 15,
  kUnexpectedMessage = 16,
  kLengthMismatch = 17,
  kPeerLost = 18,
  kDeviceError = 19,
};

// The name of spec/format.md: "ok", "checksum_mismatch", ...
[[nodiscard]] GRADWIRE_EXPORT std::string_view status_name(StatusCode code) noexcept;

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] bool ok() const noexcept { return code_ == StatusCode::kOk; }
  [[nodiscard]] StatusCode code() const noexcept { return code_; }
  // One sentence for people: it names the value that was wrong and says what would be right.
  [[nodiscard]] const std::string& message() const noexcept { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}
  Result(Status status) : state_(std::move(status)) { assert(!std::get<Status>(state_).ok()); }

  [[nodiscard]] bool ok() const noexcept { return std::holds_alternative<T>(state_); }
  [[nodiscard]] const T& value() const& {
    assert(ok());
    return *std::get_if<T>(&state_);
  }
  [[nodiscard]] T& value() & {
    assert(ok());
    return *std::get_if<T>(&state_);
  }
  [[nodiscard]] T&& value() && {
    assert(ok());
    return std::move(*std::get_if<T>(&state_));
  }
  [[nodiscard]] Status status() const { return ok() ? Status() : *std::get_if<Status>(&state_); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace gradwire
