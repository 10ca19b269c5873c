#include <string>

#include "codecs/grouped_codec.h"
#include "stages/element/float_bits.h"
#include "stages/signs/signs.h"

namespace gradwire {
namespace {

constexpr CodecParameter kParameters[] = {
    {"bucket", "whole", "multiple of 8",
     "values that share two means; by default the whole segment has two"},
};

struct OneBitParameters {
  uint32_t group_size = 0;  // values that share two means, a multiple of 8; 0: the whole segment
};

// Bytes of a group's head.
constexpr uint64_t kMeansSize = 2 * sizeof(float);

SignMeans load_means(const std::byte* head) {
  return {load_le_f32(head), load_le_f32(head + sizeof(float))};
}

// The signs of a group fill whole bytes.
class OneBitCodec final : public GroupedCodec<OneBitCodec, OneBitParameters, 8> {
 public:
  static constexpr CodecInfo kInfo = {
      .id = 5,
      .name = "onebit",
      .summary = "the sign alone, decoded to the mean of the values that have it",
      .source = "1-bit SGD (Seide et al., Interspeech 2014); 3LC, section 4.2, \"MQE 1-bit int\"",
      .error_feedback = true,
      .parameters = kParameters,
  };
  using GroupedCodec::GroupedCodec;

  bool is_coarse() const noexcept override { return true; }

 protected:
  ChunkedShape shape(uint64_t n) const override { return {groups(n), kMeansSize, sign_bytes}; }

  // The sums of parts of kChunkValues values, counted from the group's begin, are added in order.
  Measurement measure_group(const Input& input, uint64_t begin, uint64_t n) const override {
    Measurement found;
    for (uint64_t first = 0; first < n; first += kChunkValues) {
      add_to(found, sum_part(input, begin + first, std::min(kChunkValues, n - first)));
    }
    return found;
  }

  void put_head(const Measurement& group, uint64_t n, const Encoding&,
                std::byte* head) const override {
    const SignMeans means = SignMeans::create({group.sums[0], group.sums[1], group.count}, n);
    store_le_f32(head, means.positive);
    store_le_f32(head + sizeof(float), means.negative);
  }

  // The first mean is not below 0, the second not above, both finite; a zero is +0.
  Status check_heads(const ChunkedShape& shape, const std::byte* heads) const override {
    bool any = false;
    for (uint64_t group = 0; group < shape.groups.count; ++group) {
      const SignMeans means = load_means(heads + shape.head_at(group));
      const bool negative_fits = bits_of(means.negative) == 0 || means.negative < 0.0f;
      if (bits_of(means.positive) >= kNonFiniteBits || !negative_fits ||
          magnitude_bits(means.negative) >= kNonFiniteBits) {
        return corrupt_payload(kInfo.name, "a mean of group " + std::to_string(group) +
                                               " has the wrong sign, is infinite or NaN");
      }
      any |= means.positive != 0.0f || means.negative != 0.0f;
    }
    if (any) return {};
    return corrupt_payload(kInfo.name, "all means are 0, which has an empty payload");
  }

  uint64_t encode_chunk(const Encoding& encoding, uint64_t chunk, uint8_t* slot) const override {
    const Kernels& kernels = encoding.kernels();
    encoding.for_each_piece(chunk, [&](uint64_t group, uint64_t begin, uint64_t at, uint64_t n) {
      const SignMeans means = load_means(encoding.head(group));
      encoding.input.with_residual(
          begin, n, [&](uint64_t first, uint64_t count, const float* x, ResidualValues r) {
            kernels.pack_signs(x, r, count, means, slot + (at + first) / 8);
          });
    });
    return encoding.shape.chunks.room(chunk);
  }

  bool decode_chunk(const Decoding& decoding, uint64_t chunk, std::span<const uint8_t> bytes,
                    float* out) const override {
    bool valid = true;
    decoding.shape.for_each_piece(chunk, [&](uint64_t group, uint64_t at, uint64_t n) {
      const SignMeans means = load_means(decoding.head(group));
      valid &=
          decoding.kernels.unpack_signs(bytes.data() + at / 8, n, means, out + at, decoding.mode);
    });
    return valid;
  }

 private:
  static Measurement sum_part(const Input& input, uint64_t begin, uint64_t n) {
    static_assert(Input::kPartValues % kMomentLanes == 0);
    SignLanes lanes;
    input.with_residual(begin, n, [&](uint64_t, uint64_t count, const float* x, ResidualValues r) {
      input.kernels().add_sign_sums(x, r, count, lanes);
    });
    const SignSums sums = lanes.total();
    return {.count = sums.negatives, .sums = {sums.positive, sums.negative}};
  }
};

}  // namespace

const CodecEntry codec_entries::onebit = entry<OneBitCodec>();

}  // namespace gradwire
