#pragma once

#include "codecs/checks.h"
#include "codecs/chunked_codec.h"
#include "codecs/registry.h"

namespace gradwire {

struct NoParameters {};

// A codec C of 16 bits a value, each converted by itself. It has
//   static constexpr uint32_t kInfiniteFrom;  magnitude bits of the float32 that become infinite
//   static constexpr auto kNarrow, kWiden;  members of Kernels.
template <typename C>
class HalfCodec : public CodecOf<C, NoParameters, ChunkedCodec> {
 public:
  using CodecOf<C, NoParameters, ChunkedCodec>::CodecOf;

  static NoParameters parse(Parameters&) { return {}; }
  static Result<NoParameters> read(const WireCodec& wire, Dtype) {
    GW_RETURN_IF_ERROR(check_no_wire_parameters(C::kInfo, wire));
    return NoParameters();
  }

  WireCodec wire() const noexcept override { return {.id = C::kInfo.id}; }

  Status check_size(uint64_t n, uint64_t size) const override {
    return check_payload_size(C::kInfo, n, sizeof(uint16_t), size);
  }

 protected:
  std::string parameter_text() const override { return {}; }

  // A value that becomes infinite would leave an infinite residual.
  uint32_t refused_magnitude(ResidualType residual) const noexcept override {
    return residual == ResidualType::kNone ? kNonFiniteBits : C::kInfiniteFrom;
  }

  ChunkedShape shape(uint64_t n) const override {
    return {Groups(n, 0), 0, [](uint64_t values) { return values * sizeof(uint16_t); }};
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    const Kernels& kernels = encoding.kernels();
    auto* out = reinterpret_cast<uint16_t*>(slot);
    encoding.input.encode_parts(
        encoding.shape.chunks.begin(chunk), encoding.shape.chunks.values(chunk),
        [&](uint64_t first, uint64_t n, const float* b) {
          (kernels.*C::kNarrow)(b, n, out + first);
        },
        [&](uint64_t first, uint64_t n, float* decoded) {
          (kernels.*C::kWiden)(out + first, n, decoded, DecodeMode::kStore);
        });
    return encoding.shape.chunks.room(chunk);
  }

  bool decode_chunk(const Decoding& decoding, uint64_t chunk, std::span<const uint8_t> bytes,
                    float* out) const override {
    (decoding.kernels.*C::kWiden)(reinterpret_cast<const uint16_t*>(bytes.data()),
                                  decoding.shape.chunks.values(chunk), out, decoding.mode);
    return true;
  }
};

}  // namespace gradwire
