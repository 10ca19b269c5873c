#include "codecs/onebit/onebit.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>
#include <vector>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/checks.h"
#include "codecs/chunks.h"
#include "codecs/input.h"
#include "codecs/registry.h"
#include "codecs/scales.h"
#include "stages/element.h"
#include "stages/kernels.h"
#include "stages/signs.h"

namespace gradwire {
namespace {

constexpr uint32_t kBucketMultiple = 8;  // whole bytes of signs

constexpr CodecParameter kParameters[] = {
    {"bucket", "whole", "multiple of 8",
     "values that share two means; by default the whole segment has two"},
};

constexpr CodecInfo kInfo = {
    .id = 5,
    .name = "onebit",
    .summary = "the sign alone, decoded to the mean of the values that have it",
    .source = "1-bit SGD (Seide et al., Interspeech 2014); 3LC, section 4.2, \"MQE 1-bit int\"",
    .error_feedback = true,
    .lossless = false,
    .parameters = kParameters,
};

// The two means of a bucket, as the head of a payload holds them.
constexpr uint64_t kMeansSize = 2 * sizeof(float);

void store_means(std::byte* head, uint64_t bucket, SignMeans means) {
  store_le_f32(head + bucket * kMeansSize, means.positive);
  store_le_f32(head + bucket * kMeansSize + sizeof(float), means.negative);
}

SignMeans load_means(const std::byte* head, uint64_t bucket) {
  return {load_le_f32(head + bucket * kMeansSize),
          load_le_f32(head + bucket * kMeansSize + sizeof(float))};
}

bool is_zero(SignMeans means) { return means.positive == 0.0f && means.negative == 0.0f; }

// The sums of up to kChunkValues values from `begin` on.
SignSums sum_part(const Input& input, uint64_t begin, uint64_t n, const Kernels& kernels) {
  static_assert(Input::kPartValues % kMomentLanes == 0);
  SignLanes lanes;
  input.with_residual(
      begin, n,
      [&](uint64_t, uint64_t count, const float* x) { kernels.add_sign_sums(x, count, lanes); },
      [&](uint64_t, uint64_t count, const float* x, const float* r) {
        kernels.add_sign_sums_f32(x, r, count, lanes);
      },
      [&](uint64_t, uint64_t count, const float* x, const uint16_t* r) {
        kernels.add_sign_sums_bf16(x, r, count, lanes);
      });
  return lanes.total();
}

void add_to(SignSums& sums, const SignSums& more) {
  sums.positive += more.positive;
  sums.negative += more.negative;
  sums.negatives += more.negatives;
}

// First pass: calls put(bucket, sums) for each bucket. The sums of parts of kChunkValues values are
// added in their order, whoever made them. Runs from the end to the start as for_each_absmax does.
template <typename Put>
void for_each_sums(const Input& input, const Buckets& buckets, Execution& execution,
                   const Put& put) {
  const auto part_of = [&](uint64_t bucket, uint64_t part) {
    const uint64_t first = part * kChunkValues;
    return sum_part(input, buckets.begin(bucket) + first,
                    std::min(kChunkValues, buckets.values(bucket) - first), execution.kernels());
  };
  const auto parts = [&](uint64_t bucket) {
    return (buckets.values(bucket) + kChunkValues - 1) / kChunkValues;
  };
  if (buckets.count == 1) {
    std::vector<SignSums> of_part(parts(0));
    execution.for_each(of_part.size(), [&](size_t i) {
      const size_t part = of_part.size() - 1 - i;
      of_part[part] = part_of(0, part);
    });
    SignSums sums;
    for (const SignSums& more : of_part) add_to(sums, more);
    return put(0, sums);
  }
  const uint64_t buckets_a_task = std::max<uint64_t>(1, kChunkValues / buckets.bucket);
  const uint64_t tasks = (buckets.count + buckets_a_task - 1) / buckets_a_task;
  execution.for_each(tasks, [&](size_t i) {
    const uint64_t task = tasks - 1 - i;
    const uint64_t last = std::min(buckets.count, (task + 1) * buckets_a_task);
    for (uint64_t bucket = task * buckets_a_task; bucket < last; ++bucket) {
      SignSums sums;
      for (uint64_t part = 0; part < parts(bucket); ++part) add_to(sums, part_of(bucket, part));
      put(bucket, sums);
    }
  });
}

// The first mean is not below 0, the second not above, both finite; a zero is +0. One at least is
// not 0: where all are, the payload is empty.
Status check_means(const std::byte* head, uint64_t count) {
  bool any = false;
  for (uint64_t bucket = 0; bucket < count; ++bucket) {
    const SignMeans means = load_means(head, bucket);
    const bool negative_fits = bits_of(means.negative) == 0 || means.negative < 0.0f;
    if (bits_of(means.positive) >= kNonFiniteBits || !negative_fits ||
        magnitude_bits(means.negative) >= kNonFiniteBits) {
      return corrupt_payload(kInfo.name, "a mean of bucket " + std::to_string(bucket) +
                                             " has the wrong sign, is infinite or NaN");
    }
    any |= !is_zero(means);
  }
  if (any) return {};
  return corrupt_payload(kInfo.name, "all means are 0, which has an empty payload");
}

class OneBitCodec final : public Codec {
 public:
  OneBitCodec(uint32_t bucket, ResidualType residual_type)
      : Codec(residual_type), bucket_(bucket) {}

  const CodecInfo& info() const noexcept override { return kInfo; }
  OneBitParameters parameters() const { return {.bucket = bucket_}; }
  WireCodec wire() const noexcept override { return {.id = kInfo.id, .param_b = bucket_}; }
  uint64_t max_payload_size(uint64_t n) const noexcept override { return shape(n).max_size(); }

  Status check_size(uint64_t n, uint64_t size) const override {
    const ChunkShape shape = this->shape(n);
    return check_chunks_size(kInfo.name, shape, shape.max_size(), size);
  }

  Result<uint64_t> encode(const InputView& x, const ResidualView& residual, const DrawContext&,
                          std::span<std::byte> payload, Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_payload_room(*this, x.size(), payload.size()));
    GW_RETURN_IF_ERROR(check_residual_size(kInfo, x.size(), residual));
    if (x.empty()) return 0;
    const Buckets buckets(x.size(), bucket_);
    const Input input(x, residual, execution.kernels());
    std::atomic<bool> finite{true};
    std::atomic<bool> anything{false};
    for_each_sums(input, buckets, execution, [&](uint64_t bucket, const SignSums& sums) {
      // Doubles hold any sum of finite floats.
      if (!std::isfinite(sums.positive) || !std::isfinite(sums.negative)) finite = false;
      const SignMeans means = SignMeans::create(sums, buckets.values(bucket));
      if (!is_zero(means)) anything = true;
      store_means(payload.data(), bucket, means);
    });
    if (!finite) return check_finite(kInfo, x, residual);
    // Where all means are 0, nothing is sent but the header; the residual is b all the same.
    if (!anything && !input.keeps_residual()) return 0;
    const ChunkShape shape = this->shape(x.size());
    const uint64_t size =
        encode_chunks(shape, payload, execution, [&](uint64_t chunk, uint8_t* slot) {
          encode_chunk(input, buckets, shape, chunk, payload.data(), slot, execution.kernels());
          return shape.room(chunk);
        });
    return anything ? size : 0;
  }

  Status decode(std::span<const std::byte> payload, std::span<float> out, DecodeMode mode,
                Execution& execution) const override {
    GW_RETURN_IF_ERROR(check_size(out.size(), payload.size()));
    if (payload.empty()) return decode_zeros(out, mode);
    const Buckets buckets(out.size(), bucket_);
    GW_RETURN_IF_ERROR(check_means(payload.data(), buckets.count));
    const Kernels& kernels = execution.kernels();
    const auto unpack =
        mode == DecodeMode::kStore ? kernels.unpack_signs : kernels.unpack_signs_add;
    const ChunkShape shape = this->shape(out.size());
    return decode_chunks(
        shape, payload, kInfo.name, execution, [&](uint64_t chunk, std::span<const uint8_t> bytes) {
          const uint64_t first = shape.begin(chunk);
          bool valid = true;
          buckets.for_each_piece(
              first, first + shape.values(chunk), [&](uint64_t bucket, uint64_t begin, uint64_t n) {
                valid &= unpack(bytes.data() + (begin - first) / 8, n,
                                load_means(payload.data(), bucket), out.data() + begin);
              });
          return valid;
        });
  }

 protected:
  std::string parameter_text() const override {
    std::string text;
    append_bucket(text, bucket_, 0);
    return text;
  }

 private:
  [[nodiscard]] ChunkShape shape(uint64_t n) const {
    return {n, Buckets(n, bucket_).count * kMeansSize, ChunkShape::Sizes::kFixed, sign_bytes};
  }

  static void encode_chunk(const Input& input, const Buckets& buckets, const ChunkShape& shape,
                           uint64_t chunk, const std::byte* head, uint8_t* out,
                           const Kernels& kernels) {
    const uint64_t chunk_begin = shape.begin(chunk);
    buckets.for_each_piece(chunk_begin, chunk_begin + shape.values(chunk),
                           [&](uint64_t bucket, uint64_t begin, uint64_t values) {
                             const SignMeans means = load_means(head, bucket);
                             uint8_t* bits = out + (begin - chunk_begin) / 8;
                             input.with_residual(
                                 begin, values,
                                 [&](uint64_t first, uint64_t n, const float* x) {
                                   kernels.pack_signs(x, n, bits + first / 8);
                                 },
                                 [&](uint64_t first, uint64_t n, const float* x, float* r) {
                                   kernels.pack_signs_f32(x, r, n, means, bits + first / 8);
                                 },
                                 [&](uint64_t first, uint64_t n, const float* x, uint16_t* r) {
                                   kernels.pack_signs_bf16(x, r, n, means, bits + first / 8);
                                 });
                           });
  }

  uint32_t bucket_;  // values that share two means, a multiple of 8; 0: the whole segment
};

}  // namespace

std::optional<OneBitParameters> onebit_parameters(const Codec& codec) {
  const auto* onebit = dynamic_cast<const OneBitCodec*>(&codec);
  return onebit == nullptr ? std::nullopt : std::optional(onebit->parameters());
}

const CodecEntry codec_entries::onebit = {
    .info = &kInfo,
    .create = [](const Parameters& given,
                 ResidualType residual_type) -> Result<std::shared_ptr<const Codec>> {
      Result<uint32_t> bucket = given.bucket(kBucketMultiple, 0);
      if (!bucket.ok()) return bucket.status();
      return std::shared_ptr<const Codec>(
          std::make_shared<OneBitCodec>(bucket.value(), residual_type));
    },
    .from_wire = [](const WireCodec& wire, Dtype) -> Result<std::shared_ptr<const Codec>> {
      GW_RETURN_IF_ERROR(check_wire_bits(kInfo, wire.param_a, 0));
      GW_RETURN_IF_ERROR(check_wire_bits(kInfo, wire.param_b % kBucketMultiple, 0));
      return std::shared_ptr<const Codec>(
          std::make_shared<OneBitCodec>(wire.param_b, ResidualType::kFloat32));
    },
};

}  // namespace gradwire
