// The codec to copy: it has groups with scales, chunks, and a residual.

#include "codecs/int8/int8.h"

#include "codecs/grouped_codec.h"
#include "stages/int8/int8_rounding.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"bucket", "whole", "1 to 4294967295",
     "values that share a scale; by default the whole segment has one"},
};

class Int8Codec final : public GroupedCodec<Int8Codec, Int8Parameters, 1> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 4,
      .name = "int8",
      .summary = "255 levels up to the largest magnitude, rounded half to even",
      .source = "3LC (Lim, Andersen, Kaminsky; SysML 2019), section 4.2, \"8-bit int\"",
      .error_feedback = true,
      .parameters = kParameters,
  };
  using GroupedCodec::GroupedCodec;

 protected:
  // A group's head is its unit, a chunk its levels.
  ChunkedShape shape(uint64_t n) const override {
    return {groups(n), sizeof(float), [](uint64_t values) { return values; }};
  }

  void put_head(const Measurement& group, uint64_t, const Encoding&,
                std::byte* head) const override {
    store_le_f32(head, int8_unit(group.largest));
  }

  Status check_heads(const ChunkedShape& shape, const std::byte* heads) const override {
    return check_scales(kInfo.name, heads, shape.groups.count, kLargestInt8UnitBits);
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    const Kernels& kernels = encoding.kernels();
    encoding.for_each_piece(chunk, [&](uint64_t group, uint64_t begin, uint64_t at, uint64_t n) {
      const float unit = encoding.scale(group);
      auto* q = reinterpret_cast<int8_t*>(slot) + at;
      encoding.input.with_residual(
          begin, n, [&](uint64_t first, uint64_t count, const float* x, ResidualValues r) {
            kernels.quantize_int8(x, r, count, unit, q + first);
          });
    });
    return encoding.shape.chunks.room(chunk);
  }

  bool decode_chunk(const Decoding& decoding, uint64_t chunk, std::span<const uint8_t> bytes,
                    float* out) const override {
    const auto* q = reinterpret_cast<const int8_t*>(bytes.data());
    bool valid = true;
    decoding.shape.for_each_piece(chunk, [&](uint64_t group, uint64_t at, uint64_t n) {
      valid &= decoding.kernels.dequantize_int8(q + at, n, decoding.scale(group), out + at,
                                                decoding.mode);
    });
    return valid;
  }
};

}  // namespace

const CodecEntry codec_entries::int8 = entry<Int8Codec>();

}  // namespace gradwire
