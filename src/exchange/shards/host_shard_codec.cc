// The shard codec for buckets in the memory of the host.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "base/return_if_error.h"
#include "base/standard_arithmetic.h"
#include "codecs/chunked_codec.h"
#include "exchange/shards/shard_codec.h"
#include "exchange/shards/trit_segments.h"
#include "gradwire/residual.h"
#include "stages/element/float_bits.h"

namespace gradwire {
namespace {

double sum_squares(const InputView& values, const Kernels& kernels) {
  double sum = 0;
  Input(values, {}, kernels)
      .for_each_part(0, values.size(), [&](uint64_t, uint64_t n, const float* part) {
        sum += kernels.moments(part, n).squares;
      });
  return sum;
}

class HostShardCodec final : public ShardCodec {
 public:
  HostShardCodec(std::shared_ptr<const Shards> shards, std::shared_ptr<Execution> execution)
      : shards_(std::move(shards)), execution_(std::move(execution)) {
    for (uint32_t i = 0; i < shards_->layout->segments().size(); ++i) {
      residuals_.emplace_back(shards_->residual_type(i), shards_->segment(i).n);
    }
    measured_chunks_.resize(residuals_.size());
  }

  void wait_by(Arrive arrive) override { arrive_ = std::move(arrive); }
  void begin(std::span<float> bucket) override {
    bucket_ = bucket;
    arrived_ = arrive_ ? 0 : bucket.size();
    if (trits_) require(bucket.size());
    for (auto& chunks : measured_chunks_) chunks.clear();
    if (trits_) trits_->begin(bucket);
  }

  Result<FirstNonFinite> find_non_finite(std::span<const uint32_t> shards) override;
  Result<FirstNonFinite> encode(std::span<const uint32_t> shards, std::span<const uint32_t> finite,
                                uint64_t step, std::span<PacketWriter> packets,
                                const Encoded& encoded) override;
  void put_back(uint32_t shard, const Packet& packet) override;
  Status decode(uint32_t shard, std::span<const Packet* const> packets, DecodeMode mode,
                const Next& next) override;
  void divide(uint32_t shard, float divisor) override;
  void fill_nan(uint32_t shard) override;

  ResidualType residual_type(uint32_t i) const override { return residuals_[i].type(); }
  std::vector<float> residual(uint32_t i) const override { return residuals_[i].values(); }
  void reset_residual(uint32_t i, ResidualType type) override {
    residuals_[i] = Residual(type, shards_->segment(i).n);
  }
  void add_to_residual(uint32_t i, uint64_t first, std::span<const float> values,
                       float factor) override {
    residuals_[i].add(first, values, factor);
  }
  void scale_residuals(float factor) override {
    for (Residual& residual : residuals_) residual.scale(factor);
  }
  uint64_t residual_bytes() const override {
    uint64_t bytes = 0;
    for (const Residual& residual : residuals_) bytes += room_of(residual);
    return bytes;
  }
  void keep_residuals_in(std::span<std::byte> memory) override {
    for (Residual& residual : residuals_) {
      if (residual.size() > 0) residual.lie_in(memory.first(residual.nbytes()));
      memory = memory.subspan(room_of(residual));
    }
  }
  void pay_residual(uint32_t i) override {
    const StandardArithmetic arithmetic;
    const std::vector<float> owed = residuals_[i].values();
    float* sums = values(i).data();
    execution_->kernels().sum(sums, owed.data(), owed.size(), sums);
  }

  void add_norms(uint32_t shard, const Packet& packet, Norms& norms) override;
  std::vector<ResidualNorms> residual_norms(std::span<const uint32_t> shards) override;

  SharedScales* share_scales() override {
    trits_ = std::make_unique<TritSegments>(*shards_, *execution_);
    return trits_.get();
  }

 private:
  // Residuals in one memory begin at addresses for floats.
  [[nodiscard]] static uint64_t room_of(const Residual& residual) {
    return (residual.nbytes() + sizeof(float) - 1) / sizeof(float) * sizeof(float);
  }
  // Waits for the bucket's first `end` values.
  void require(uint64_t end) const {
    if (end > arrived_) arrived_ = arrive_(end);
  }
  [[nodiscard]] std::span<float> values(uint32_t i) const {
    const Segment& segment = shards_->segment(i);
    require(segment.bucket_offset + segment.n);
    return bucket_.subspan(segment.bucket_offset, segment.n);
  }
  [[nodiscard]] double squares_of_residual(uint32_t i) {
    const ResidualView kept = residuals_[i].view();
    const bool wide = kept.type() == ResidualType::kFloat32;
    return sum_squares(wide ? InputView(std::span<const float>(kept.f32(), kept.size()))
                            : InputView(Dtype::kBfloat16, std::span(kept.bf16(), kept.size())),
                       execution_->kernels());
  }
  [[nodiscard]] bool has_trits(uint32_t i) const { return trits_ && trits_->has(i); }
  // Whether the values of segment i in the bucket are of no step: a dedicated server adds trits.
  [[nodiscard]] bool has_no_values(uint32_t i) const {
    return has_trits(i) && !shards_->is_worker();
  }
  // Whether segment i's NaN and Inf are sent unchanged.
  [[nodiscard]] bool carries(uint32_t i) const {
    return shards_->own_codec(i)->info().carries_non_finite &&
           residuals_[i].type() == ResidualType::kNone;
  }
  Result<FirstNonFinite> measure(std::span<const uint32_t> shards,
                                 std::span<const uint32_t> finite);
  Result<FirstNonFinite> measure_segments(std::span<const uint32_t> segments);
  // Names the first NaN or Inf of segment i, or else the first sum with the residual that
  // overflows.
  [[nodiscard]] FirstNonFinite origin_in(uint32_t i);
  Status restore(uint32_t shard, const Packet& packet);
  // decoded: as in Codec::encode.
  Status encode_segment(uint32_t i, uint64_t step, PacketWriter& packet, std::span<float> decoded);
  // Decodes the packet of this rank's own shard into the bucket.
  Status decode_own(const Packet& packet);
  // Whether no value of segment i can be refused any more, so that encoding can decode at once.
  [[nodiscard]] bool is_certain(uint32_t i) const {
    return !has_trits(i) && (measured_[i].complete || carries(i));
  }
  Status decode_segment(uint32_t i, const Packet& packet, std::span<const std::byte> payload,
                        DecodeMode mode, const AfterChunk& after);
  // Returns the function that divides and measures each decoded chunk, as `next` asks.
  AfterChunk prepare_chunks(uint32_t i, const Next& next);

  std::shared_ptr<const Shards> shards_;
  std::shared_ptr<Execution> execution_;
  std::vector<Residual> residuals_;    // of each segment
  std::vector<Measurement> measured_;  // of each segment, for the encoding under way
  std::vector<std::vector<Measurement>> measured_chunks_;  // of each segment; empty: not measured
  std::unique_ptr<TritSegments> trits_;                    // null unless scales are shared
  std::span<float> bucket_;
  Arrive arrive_;
  mutable uint64_t arrived_ = 0;  // so many of the bucket's first values
};

Result<FirstNonFinite> HostShardCodec::find_non_finite(std::span<const uint32_t> shards) {
  for (uint32_t shard : shards) {
    for (uint32_t i : shards_->segments[shard]) {
      if (has_no_values(i)) continue;
      const Input input(values(i), {}, execution_->kernels());
      const uint32_t largest = measure_chunks(input, *execution_, measure_absmax).largest;
      if (largest >= kNonFiniteBits) return origin_in(i);
    }
  }
  return FirstNonFinite();
}

// Measures all segments before any of them is encoded, and keeps the results in measured_.
Result<FirstNonFinite> HostShardCodec::measure(std::span<const uint32_t> shards,
                                               std::span<const uint32_t> finite) {
  measured_.assign(residuals_.size(), Measurement());
  for (const uint32_t shard : finite) {
    const bool encoded = std::ranges::find(shards, shard) != shards.end();
    Result<FirstNonFinite> found =
        encoded ? measure_segments(shards_->segments[shard]) : find_non_finite({&shard, 1});
    if (!found.ok() || found.value()) return found;
  }
  std::vector<uint32_t> prepared;
  for (uint32_t shard : shards) {
    std::ranges::copy_if(shards_->segments[shard], std::back_inserter(prepared),
                         [&](uint32_t i) { return !measured_chunks_[i].empty(); });
  }
  return measure_segments(prepared);
}

Result<FirstNonFinite> HostShardCodec::measure_segments(std::span<const uint32_t> segments) {
  for (uint32_t i : segments) {
    if (has_trits(i)) continue;  // they were measured for their scales
    Result<Measurement> found = shards_->own_codec(i)->measure(
        values(i), residuals_[i].view(), *execution_, std::exchange(measured_chunks_[i], {}));
    if (found.status().code() == StatusCode::kNonFinite) return origin_in(i);
    GW_RETURN_IF_ERROR(found.status());
    measured_[i] = found.value();
  }
  return FirstNonFinite();
}

FirstNonFinite HostShardCodec::origin_in(uint32_t i) {
  const std::span<const float> x = values(i);
  const auto bad = std::ranges::find_if(x, [](float v) { return !std::isfinite(v); });
  const std::optional<uint64_t> element =
      bad != x.end() ? static_cast<uint64_t>(bad - x.begin())
                     : shards_->own_codec(i)->find_non_finite(x, residuals_[i].view(), *execution_);
  return NonFiniteOrigin{.rank = shards_->rank, .segment = i, .element = element.value_or(0)};
}

Result<FirstNonFinite> HostShardCodec::encode(std::span<const uint32_t> shards,
                                              std::span<const uint32_t> finite, uint64_t step,
                                              std::span<PacketWriter> packets,
                                              const Encoded& encoded) {
  Result<FirstNonFinite> found = measure(shards, finite);
  if (!found.ok() || found.value()) return found;
  const uint32_t own = shards_->rank;
  const bool decodes = std::ranges::find(shards, own) != shards.end();
  // If a codec may still refuse a value, residuals may have to be restored from the input values.
  const bool decodes_at_once =
      decodes &&
      std::ranges::all_of(shards_->segments[own], [&](uint32_t i) { return is_certain(i); });
  const bool none_can_fail = std::ranges::all_of(shards, [&](uint32_t shard) {
    return std::ranges::all_of(shards_->segments[shard], [&](uint32_t i) { return is_certain(i); });
  });
  for (uint32_t shard : shards) {
    for (uint32_t i : shards_->segments[shard]) {
      const Status status =
          encode_segment(i, step, packets[shard],
                         decodes_at_once && shard == own ? values(i) : std::span<float>());
      if (status.ok()) continue;
      if (status.code() != StatusCode::kNonFinite) return status;
      const FirstNonFinite origin = origin_in(i);
      for (uint32_t begun : shards) {
        GW_RETURN_IF_ERROR(restore(begun, packets[begun].packet()));
        packets[begun].restart();
      }
      return origin;
    }
    if (none_can_fail) encoded(shard);
  }
  if (decodes && !decodes_at_once) GW_RETURN_IF_ERROR(decode_own(packets[own].packet()));
  if (!none_can_fail) std::ranges::for_each(shards, encoded);
  return FirstNonFinite();
}

Status HostShardCodec::decode_own(const Packet& packet) {
  for (size_t k = 0; k < packet.frames.size(); ++k) {
    const uint32_t i = shards_->segments[shards_->rank][k];
    if (shards_->own_codec(i)->info().lossless) continue;
    GW_RETURN_IF_ERROR(decode_segment(i, packet, packet.frames[k].payload, DecodeMode::kStore, {}));
  }
  return {};
}

Status HostShardCodec::restore(uint32_t shard, const Packet& packet) {
  for (size_t k = 0; k < packet.frames.size(); ++k) {
    const uint32_t i = shards_->segments[shard][k];
    if (residuals_[i].type() == ResidualType::kNone) continue;
    GW_RETURN_IF_ERROR(shards_->own_codec(i)->restore(packet.frames[k].payload, values(i),
                                                      residuals_[i].view(), *execution_));
  }
  return {};
}

Status HostShardCodec::encode_segment(uint32_t i, uint64_t step, PacketWriter& packet,
                                      std::span<float> decoded) {
  return packet.add_encoded([&](std::span<std::byte> payload) -> Result<uint64_t> {
    if (has_trits(i)) return trits_->encode(i, step, payload);
    const DrawContext draw = {
        .seed = shards_->seed, .stream = shards_->draw_streams[i], .step = step};
    return shards_->own_codec(i)->encode(values(i), residuals_[i].view(), draw, payload,
                                         *execution_, measured_[i], decoded);
  });
}

void HostShardCodec::put_back(uint32_t shard, const Packet& packet) {
  for (size_t k = 0; k < packet.frames.size(); ++k) {
    const uint32_t i = shards_->segments[shard][k];
    if (residuals_[i].type() == ResidualType::kNone) continue;
    std::vector<float> sent(shards_->segment(i).n);
    const Status decoded = shards_->own_codec(i)->decode(packet.frames[k].payload, sent,
                                                         DecodeMode::kStore, *execution_);
    if (decoded.ok()) residuals_[i].add(0, sent, 1.0f);
  }
}

Status HostShardCodec::decode(uint32_t shard, std::span<const Packet* const> packets,
                              DecodeMode mode, const Next& next) {
  for (const Packet* packet : packets) {
    const bool last = packet == packets.back();
    for (size_t k = 0; k < packet->frames.size(); ++k) {
      const uint32_t i = shards_->segments[shard][k];
      GW_RETURN_IF_ERROR(decode_segment(i, *packet, packet->frames[k].payload, mode,
                                        last ? prepare_chunks(i, next) : AfterChunk()));
    }
    mode = DecodeMode::kAdd;
  }
  return {};
}

Status HostShardCodec::decode_segment(uint32_t i, const Packet& packet,
                                      std::span<const std::byte> payload, DecodeMode mode,
                                      const AfterChunk& after) {
  const Direction direction = packet.header.direction;
  if (has_trits(i) && direction == Direction::kPush) {
    return trits_->add(i, packet.header.source, payload);
  }
  return shards_->codec(i, direction)->decode(payload, values(i), mode, *execution_, after);
}

AfterChunk HostShardCodec::prepare_chunks(uint32_t i, const Next& next) {
  if (has_trits(i)) return {};
  const Codec& codec = *shards_->own_codec(i);
  const bool measures = next.encode && !carries(i) && codec.measures_chunks(values(i).size());
  if (next.divisor == 1.0f && !measures) return {};
  if (measures) measured_chunks_[i].resize((values(i).size() + kChunkValues - 1) / kChunkValues);
  return [this, i, &codec, measures, divisor = next.divisor](uint64_t begin, uint64_t n) {
    if (divisor != 1.0f) execution_->kernels().divide(values(i).data() + begin, n, divisor);
    if (!measures) return;
    measured_chunks_[i][begin / kChunkValues] =
        codec.measure_chunk(values(i), residuals_[i].view(), begin, *execution_);
  };
}

void HostShardCodec::divide(uint32_t shard, float divisor) {
  const StandardArithmetic arithmetic;
  for (uint32_t i : shards_->segments[shard]) {
    if (has_no_values(i)) continue;
    execution_->kernels().divide(values(i).data(), values(i).size(), divisor);
  }
}

void HostShardCodec::fill_nan(uint32_t shard) {
  for (uint32_t i : shards_->segments[shard]) {
    std::ranges::fill(values(i), std::numeric_limits<float>::quiet_NaN());
  }
}

void HostShardCodec::add_norms(uint32_t shard, const Packet& packet, Norms& norms) {
  const StandardArithmetic arithmetic;
  const Kernels& kernels = execution_->kernels();
  std::vector<float> left;
  for (size_t k = 0; k < packet.frames.size(); ++k) {
    const uint32_t i = shards_->segments[shard][k];
    if (!shards_->compressed[i]) continue;
    const std::span<const float> x = values(i);
    norms.input += sum_squares(x, kernels);
    if (residuals_[i].type() != ResidualType::kNone) {
      norms.error += squares_of_residual(i);
      continue;
    }
    left.resize(x.size());
    const Status status = shards_->own_codec(i)->decode(packet.frames[k].payload, left,
                                                        DecodeMode::kStore, *execution_);
    if (!status.ok()) continue;
    kernels.subtract(x.data(), left.data(), x.size(), left.data());
    norms.error += sum_squares(left, kernels);
  }
}

std::vector<ShardCodec::ResidualNorms> HostShardCodec::residual_norms(
    std::span<const uint32_t> shards) {
  const StandardArithmetic arithmetic;
  std::vector<ResidualNorms> norms;
  for (uint32_t shard : shards) {
    for (uint32_t i : shards_->segments[shard]) {
      if (residuals_[i].type() == ResidualType::kNone) continue;
      norms.push_back({.segment = i,
                       .residual = squares_of_residual(i),
                       .input = sum_squares(values(i), execution_->kernels())});
    }
  }
  return norms;
}

}  // namespace

ShardCodecFactory host_shard_codecs(Execution execution) {
  return [shared = std::make_shared<Execution>(std::move(execution))](
             std::shared_ptr<const Shards> shards) -> Result<std::unique_ptr<ShardCodec>> {
    return std::unique_ptr<ShardCodec>(std::make_unique<HostShardCodec>(std::move(shards), shared));
  };
}

}  // namespace gradwire
