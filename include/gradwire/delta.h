#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "gradwire/execution.h"
#include "gradwire/export.h"
#include "gradwire/status.h"

namespace gradwire {

// A delta leads from one array of elements to another of the same length, exactly, whatever their
// bits (spec/format.md, Delta). It is small where few elements change, or change by little: in the
// weights of a model in bfloat16, an optimizer's step changes 1 to 10 % of the elements, most by
// one unit in the last place.

inline constexpr uint64_t kDeltaHeaderSize = 48;

// The width of an element and the order in which its changes are counted. Any dtype can be sent as
// any element of its width; the right one makes the smaller delta. An element of 64 bits is sent as
// two of 32.
enum class DeltaElement : uint8_t {
  kInteger8 = 0,
  kInteger16 = 1,
  kInteger32 = 2,
  kFloat8 = 16,   // sign and magnitude: E4M3, E5M2
  kFloat16 = 17,  // bfloat16, IEEE binary16
  kFloat32 = 18,
};

// Bytes of an element.
[[nodiscard]] GRADWIRE_EXPORT uint64_t width_of(DeltaElement element) noexcept;

struct DecodedChunks;

struct Delta {
  DeltaElement element = DeltaElement::kFloat16;
  uint64_t n = 0;        // elements of either array
  uint64_t changed = 0;  // elements that differ
  uint64_t base_digest = 0;
  uint64_t result_digest = 0;
  std::span<const std::byte> payload;            // inside the bytes that were parsed
  std::shared_ptr<const DecodedChunks> decoded;  // of decode_delta
};

// What identifies the bits of an array: XXH3-64 of the XXH3-64 of each 64 KiB, as little-endian
// 64-bit words. It finds mistakes, not forgeries.
[[nodiscard]] GRADWIRE_EXPORT uint64_t digest_array(std::span<const std::byte> array,
                                                    Execution& execution);

// The bytes that encode_delta and fold_deltas need for n elements.
[[nodiscard]] GRADWIRE_EXPORT uint64_t max_delta_size(DeltaElement element, uint64_t n) noexcept;

struct EncodedDelta {
  uint64_t size = 0;  // bytes
  uint64_t changed = 0;
  uint64_t base_digest = 0;
  uint64_t result_digest = 0;
};

// What encode_delta leaves in `base`: the array as it was, or the result.
enum class DeltaBase : uint8_t { kKeep, kFollow };

// Writes to `delta` how `base` becomes `result`. Neither array need be aligned. If another thread
// writes to `result` meanwhile, the delta, its digest and a base that follows are of the same mix
// of its values.
//   follow: kFollow makes `base` equal to `result` in the same pass.
//   base_digest: digest_array(base), if the caller knows it; it saves a pass over the base in
//   cache. kLengthMismatch: the arrays differ in length, or it is no multiple of the element's
//   width. kBufferTooSmall: `delta` is smaller than max_delta_size.
GRADWIRE_EXPORT Result<EncodedDelta> encode_delta(DeltaElement element, std::span<std::byte> base,
                                                  std::span<const std::byte> result,
                                                  DeltaBase follow, std::span<std::byte> delta,
                                                  Execution& execution,
                                                  std::optional<uint64_t> base_digest = {});

// Checks everything but the chunks' content.
//   kTruncated, kBadMagic, kUnsupportedVersion, kReservedBits, kTrailingBytes, kLimitExceeded,
//   kChecksumMismatch.
GRADWIRE_EXPORT Result<Delta> parse_delta(std::span<const std::byte> bytes);

// Decodes the chunks in which few elements change, so that apply_delta only moves elements: for who
// wants to use the array until then. A chunk in which elements change takes two bits for each, and
// six bytes for each step of two or more. kCorruptPayload.
GRADWIRE_EXPORT Status decode_delta(Delta& delta, Execution& execution);

// Makes the base in `values` the result, in place.
//   kLengthMismatch: `values` has another length; nothing was changed.
//   kCorruptPayload: the chunks are not what an encoder writes; kChecksumMismatch: the result has
//   another digest, because `values` held another base. Part of `values` may be changed then.
GRADWIRE_EXPORT Status apply_delta(const Delta& delta, std::span<std::byte> values,
                                   Execution& execution);

// Writes to `folded` one delta for two that follow each other, without their arrays.
//   kInvalidArgument: the second does not begin where the first ends; kBufferTooSmall;
//   kCorruptPayload.
GRADWIRE_EXPORT Result<EncodedDelta> fold_deltas(const Delta& first, const Delta& second,
                                                 std::span<std::byte> folded, Execution& execution);

}  // namespace gradwire
