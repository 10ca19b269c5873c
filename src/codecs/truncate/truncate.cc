#include <iterator>
#include <string>

#include "codecs/checks.h"
#include "codecs/chunked_codec.h"
#include "codecs/registry.h"
#include "stages/truncation/truncation.h"

namespace gradwire {
namespace {

struct TruncateParameters {
  static constexpr uint32_t kLowBits[] = {8, 2, 0};

  uint16_t cut = 0;  // index of kCutNames

  // Bits that are sent beside the upper byte of a value.
  [[nodiscard]] uint32_t low_bits() const { return kLowBits[cut]; }
};

constexpr std::string_view kCutNames[] = {"16", "22", "24"};

constexpr CodecParameter kParameters[] = {{"bits", "16", "16|22|24", "low bits that are cut off"}};

// Bytes of the bits beside the upper bytes of n values.
uint64_t low_size(uint64_t n, uint32_t low_bits) {
  return low_bits == 2 ? n / kLowFields + (n % kLowFields != 0) : n * low_bits / 8;
}

class TruncateCodec final : public CodecOf<TruncateCodec, TruncateParameters, ChunkedCodec> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 8,
      .name = "truncate",
      .summary = "floats without their lowest 16, 22 or 24 bits",
      .source = "the baseline of INCEPTIONN (Li et al.; MICRO 2018), sections III and VIII",
      .parameters = kParameters,
  };
  using CodecOf::CodecOf;

  static TruncateParameters parse(Parameters& given) {
    return {.cut = given.choice("bits", kCutNames, uint16_t{0})};
  }

  static Result<TruncateParameters> read(const WireCodec& wire, Dtype) {
    GW_RETURN_IF_ERROR(check_wire_bits(kInfo, wire.param_a, std::size(kCutNames) - 1));
    GW_RETURN_IF_ERROR(check_wire_bits(kInfo, wire.param_b, 0));
    return TruncateParameters{.cut = wire.param_a};
  }

  WireCodec wire() const noexcept override { return {.id = kInfo.id, .param_a = parameters().cut}; }

  Status check_size(uint64_t n, uint64_t size) const override {
    const uint64_t expected = max_payload_size(n);
    if (size == expected) return {};
    return corrupt_payload(kInfo.name, std::to_string(n) + " values take " +
                                           std::to_string(expected) + " bytes, the payload has " +
                                           std::to_string(size));
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_choice(text, "bits", kCutNames, parameters().cut, uint16_t{0});
    return text;
  }

  ChunkedShape shape(uint64_t n) const override {
    return {Groups(n, 0), 0, [bits = parameters().low_bits()](uint64_t values) {
              return values + low_size(values, bits);
            }};
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    const Kernels& kernels = encoding.kernels();
    const uint64_t values = encoding.shape.chunks.values(chunk);
    const uint32_t low_bits = parameters().low_bits();
    const auto low = [&](uint64_t first) { return slot + values + low_size(first, low_bits); };
    encoding.input.encode_parts(
        encoding.shape.chunks.begin(chunk), values,
        [&](uint64_t first, uint64_t n, const float* b) {
          kernels.truncate_encode(b, n, low_bits, slot + first, low(first));
        },
        [&](uint64_t first, uint64_t n, float* decoded) {
          kernels.truncate_decode(slot + first, low(first), n, low_bits, decoded,
                                  DecodeMode::kStore);
        });
    return encoding.shape.chunks.room(chunk);
  }

  bool decode_chunk(const Decoding& decoding, uint64_t chunk, std::span<const uint8_t> bytes,
                    float* out) const override {
    const uint64_t values = decoding.shape.chunks.values(chunk);
    return decoding.kernels.truncate_decode(bytes.data(), bytes.data() + values, values,
                                            parameters().low_bits(), out, decoding.mode);
  }
};

}  // namespace

const CodecEntry codec_entries::truncate = entry<TruncateCodec>();

}  // namespace gradwire
