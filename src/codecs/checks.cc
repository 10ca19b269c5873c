#include "codecs/checks.h"

#include <string>

namespace gradwire {

Status corrupt_payload(std::string_view name, std::string_view what) {
  return {StatusCode::kCorruptPayload, std::string(name) + ": " + std::string(what)};
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
