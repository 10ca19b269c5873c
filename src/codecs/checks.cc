#include "codecs/checks.h"

#include <algorithm>
#include <string>

namespace gradwire {

Status corrupt_payload(std::string_view name, std::string_view what) {
  return {StatusCode::kCorruptPayload, std::string(name) + ": " + std::string(what)};
}

Status changed_meanwhile(const CodecInfo& info) {
  return {StatusCode::kNonFinite,
          std::string(info.name) +
              ": the values changed while they were encoded, and some were not "
              "finite; no other thread may write to them meanwhile"};
}

Status check_payload_size(const CodecInfo& info, uint64_t n, uint64_t width, uint64_t size) {
  if (n <= kMaxNumel && size == n * width) return {};
  return corrupt_payload(info.name, std::to_string(n) + " values of " + std::to_string(width) +
                                        " bytes don't make a payload of " + std::to_string(size) +
                                        " bytes");
}

Status check_chunks_size(std::string_view name, const ChunkShape& shape, uint64_t least,
                         uint64_t size) {
  if (size == 0 || (shape.n > 0 && size >= least && size <= shape.max_size())) return {};
  return corrupt_payload(name, std::to_string(shape.n) + " values don't fit a payload of " +
                                   std::to_string(size) + " bytes");
}

Status check_scales(std::string_view name, const std::byte* scales, uint64_t count,
                    uint32_t largest) {
  bool any = false;
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t bits = load_le<uint32_t>(scales + i * sizeof(float));
    if (bits >= kNonFiniteBits) {
      return corrupt_payload(name, "scale " + std::to_string(i) + " is negative, infinite or NaN");
    }
    if (bits > largest) {
      return corrupt_payload(
          name, "scale " + std::to_string(i) + " makes values beyond the largest float32");
    }
    any |= bits != 0;
  }
  return any ? Status() : corrupt_payload(name, "all scales are 0, which has an empty payload");
}

bool all_zero(const std::byte* scales, uint64_t count) {
  return std::all_of(scales, scales + count * sizeof(float),
                     [](std::byte byte) { return byte == std::byte{0}; });
}

Status check_wire_bits(const CodecInfo& info, uint32_t bits, uint32_t largest) {
  if (bits <= largest) return {};
  return {StatusCode::kReservedBits,
          std::string(info.name) + ": reserved bits are set in the parameters"};
}

Status check_wire_group_size(const CodecInfo& info, const WireCodec& wire, uint32_t multiple) {
  if (wire.param_b % multiple == 0) return {};
  return {StatusCode::kReservedBits, std::string(info.name) + ": bucket " +
                                         std::to_string(wire.param_b) + " is not a multiple of " +
                                         std::to_string(multiple)};
}

Status check_no_wire_parameters(const CodecInfo& info, const WireCodec& wire) {
  return check_wire_bits(info, wire.param_a | wire.param_b, 0);
}

}  // namespace gradwire
