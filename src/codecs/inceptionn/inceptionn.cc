#include "codecs/inceptionn/inceptionn.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/chunked_codec.h"
#include "codecs/registry.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"bound", "10", "10|8|6", "values below 2^-bound are not sent"},
    {"mode", "paper", "paper|strict",
     "paper: errors up to 2^-7 where a value takes 8 bits; strict: never above 2^-bound"},
};

// Bits of param_a (codecs/inceptionn/spec.md).
constexpr uint16_t kBoundMask = 3;
constexpr int kModeShift = 2;

constexpr std::string_view kBoundNames[] = {"10", "8", "6"};
constexpr std::string_view kModes[] = {"paper", "strict"};

// Bytes of the tags of n values; whole bursts fill a chunk.
uint64_t tags_size(uint64_t n) {
  return (n / kBurstValues + (n % kBurstValues != 0)) * kBurstTagBytes;
}

class InceptionnCodec final : public CodecOf<InceptionnCodec, InceptionnParameters, ChunkedCodec> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 7,
      .name = "inceptionn",
      .summary = "floats cut to 0, 8, 16 or 32 bits by their size, for an absolute error bound",
      .source = "INCEPTIONN (Li et al.; MICRO 2018), section V",
      .carries_non_finite = true,
      .parameters = kParameters,
  };
  using CodecOf::CodecOf;

  static InceptionnParameters parse(Parameters& given) {
    return {.bound = given.choice("bound", kBoundNames, uint16_t{0}),
            .mode = given.choice("mode", kModes, ClipMode::kPaper)};
  }

  static Result<InceptionnParameters> read(const WireCodec& wire, Dtype) {
    const InceptionnParameters parameters = {
        .bound = static_cast<uint16_t>(wire.param_a & kBoundMask),
        .mode = static_cast<ClipMode>(wire.param_a >> kModeShift & 1)};
    if (parameters.bound >= std::size(InceptionnParameters::kBounds)) {
      return Status(StatusCode::kReservedBits, "inceptionn: bound 3 is reserved");
    }
    if (wire.param_a >> (kModeShift + 1) != 0 || wire.param_b != 0) {
      return Status(StatusCode::kReservedBits, "inceptionn: reserved parameter bits are set");
    }
    return parameters;
  }

  WireCodec wire() const noexcept override {
    const auto mode = static_cast<uint16_t>(parameters().mode);
    return {.id = kInfo.id,
            .param_a = static_cast<uint16_t>(parameters().bound | mode << kModeShift)};
  }

  Status check_size(uint64_t n, uint64_t size) const override {
    const ChunkShape chunks = shape(n).chunks;
    if (size >= chunks.least_size && size <= chunks.max_size()) return {};
    return corrupt_payload(kInfo.name, std::to_string(n) + " values take " +
                                           std::to_string(chunks.least_size) + " to " +
                                           std::to_string(chunks.max_size()) +
                                           " bytes, the payload has " + std::to_string(size));
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_choice(text, "bound", kBoundNames, parameters().bound, uint16_t{0});
    append_choice(text, "mode", kModes, parameters().mode, ClipMode::kPaper);
    return text;
  }

  ChunkedShape shape(uint64_t n) const override {
    return {Groups(n, 0), 0, [](uint64_t values) {
              const uint64_t tags = tags_size(values);
              return ChunkSize(tags, tags + values * sizeof(float));
            }};
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    const Kernels& kernels = encoding.kernels();
    const FloatClip clip = parameters().clip();
    uint8_t* part = slot;
    uint64_t part_size = 0;
    encoding.input.encode_parts(
        encoding.shape.chunks.begin(chunk), encoding.shape.chunks.values(chunk),
        [&](uint64_t, uint64_t n, const float* b) {
          part += part_size;
          part_size = kernels.float_clip_encode(b, n, clip, part);
        },
        [&](uint64_t, uint64_t n, float* decoded) {
          kernels.float_clip_decode(part, part_size, n, decoded, DecodeMode::kStore);
        });
    return static_cast<uint64_t>(part - slot) + part_size;
  }

  bool decode_chunk(const Decoding& decoding, uint64_t chunk, std::span<const uint8_t> bytes,
                    float* out) const override {
    return decoding.kernels.float_clip_decode(
        bytes.data(), bytes.size(), decoding.shape.chunks.values(chunk), out, decoding.mode);
  }
};

}  // namespace

Result<std::optional<ClassCounts>> count_classes(const Codec& codec, uint64_t n,
                                                 std::span<const std::byte> payload) {
  if (codec.info().id != InceptionnCodec::kInfo.id || payload.empty()) {
    return std::optional<ClassCounts>();
  }
  ClassCounts counts{};
  const ChunkShape chunks = as_chunked(codec)->shape(n).chunks;
  GW_ASSIGN_OR_RETURN(Execution execution, Execution::create());  // one thread
  const auto count_chunk = [&](uint64_t chunk, std::span<const uint8_t> bytes) {
    for (uint64_t left = chunks.values(chunk); left > 0;) {
      const uint64_t values = std::min<uint64_t>(left, kBurstValues);
      if (bytes.size() < kBurstTagBytes) return false;
      uint32_t tags = load_le<uint16_t>(reinterpret_cast<const std::byte*>(bytes.data()));
      uint64_t size = kBurstTagBytes;
      for (uint64_t i = 0; i < values; ++i, tags >>= 2) {
        ++counts[tags & 3];
        size += uint64_t{1} << (tags & 3) >> 1;  // 0, 1, 2, 4 bytes
      }
      if (tags != 0 || size > bytes.size()) return false;
      bytes = bytes.subspan(size);
      left -= values;
    }
    return bytes.empty();
  };
  GW_RETURN_IF_ERROR(decode_chunks(chunks, payload, codec.info().name, execution, count_chunk));
  return std::optional(counts);
}

const CodecEntry codec_entries::inceptionn = entry<InceptionnCodec>();

}  // namespace gradwire
