#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checksum.h"
#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/drawn_ternary.h"
#include "codecs/terngrad/terngrad.h"
#include "codecs/trit_sums.h"
#include "exchange/sharded_exchange.h"
#include "exchange/timer.h"
#include "stages/element.h"
#include "stages/levels.h"

namespace gradwire {
namespace {

// One scale for all values, whatever their number, as far as param_b reaches.
constexpr uint32_t kWholeSegment = 4294967288;

// A max round, and then what the sharded exchange does, but for the segments of trits.
class TernGradExchange final : public ShardedExchange {
 public:
  TernGradExchange(std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
                   uint64_t seed)
      : ShardedExchange(std::move(layout), rank, std::move(execution), seed, Legs::kPushAndPull,
                        Reduction::kAverage),
        scale_arrivals_(world_size()) {}

  Status prepare();

  bool done() const override { return scales_missing_ == 0 && ShardedExchange::done(); }
  std::vector<uint32_t> awaiting() const override;
  Status receive(uint32_t peer, std::span<const std::byte> message) override;

 protected:
  std::string name() const override { return "terngrad"; }
  Status begin_step() override;
  Status encode_segment(uint32_t i, PacketWriter& writer) override;
  Status decode_segment(uint32_t i, const PacketHeader& header, std::span<const std::byte> payload,
                        DecodeMode mode) override;

 private:
  // A segment that goes as trits.
  struct Trits {
    TernGradParameters parameters;
    TernaryShape shape;
    uint64_t scales_at;             // bytes in scales_
    float limit = 0;                // what this rank's values are clipped to
    std::vector<int8_t> sums = {};  // of the owner
  };

  [[nodiscard]] const Segment& segment(uint32_t i) const { return layout().segments()[i]; }
  [[nodiscard]] std::byte* scales_of(const Trits& trits) {
    return scales_.data() + trits.scales_at;
  }
  [[nodiscard]] bool owns(uint32_t i) const { return segment(i).owner == rank(); }

  // This rank's scales and limits; false: something is not finite.
  bool measure();
  Status take_scales(uint32_t peer, const Packet& packet, uint64_t size);
  // All scales are here.
  Status start_pushes();
  // The payload of trits with everyone's scales. Returns its size.
  uint64_t draw(uint32_t i, std::span<std::byte> payload);
  Status add_own_trits();

  std::vector<std::optional<Trits>> trits_;  // of each segment
  std::vector<std::byte> scales_;            // f32: this rank's, and then the largest of all
  uint64_t scales_digest_ = 0;
  std::optional<PacketWriter> scales_writer_;
  std::vector<std::byte> own_payload_;  // trits of a segment that this rank owns
  uint32_t scales_missing_ = 0;
  std::vector<Arrival> scale_arrivals_;
  std::optional<NonFiniteOrigin> marker_;  // of the lowest rank that isn't finite
  // Pushes of ranks that had all scales before this one.
  std::vector<std::pair<uint32_t, std::vector<std::byte>>> early_messages_;
};

Status TernGradExchange::prepare() {
  GW_RETURN_IF_ERROR(ShardedExchange::prepare());
  uint64_t own_size = 0;
  for (uint32_t i = 0; i < layout().segments().size(); ++i) {
    const auto parameters = terngrad_parameters(*segment(i).push_codec);
    trits_.emplace_back();
    if (!parameters) continue;
    const TernaryShape shape = parameters->shape(segment(i).n);
    trits_.back() = {.parameters = *parameters, .shape = shape, .scales_at = scales_.size()};
    scales_.resize(scales_.size() + shape.buckets.count * sizeof(float));
    if (!owns(i)) continue;
    trits_.back()->sums.resize(segment(i).n);
    own_size = std::max(own_size, shape.max_size());
  }
  own_payload_.resize(own_size);
  const std::string description = describe();
  const uint64_t behind_the_shards = world_size();
  scales_digest_ = digest64(
      {std::as_bytes(std::span(description)), std::as_bytes(std::span(&behind_the_shards, 1))});
  Result<std::shared_ptr<const Codec>> raw = Codec::parse("raw");
  if (!raw.ok()) return raw.status();
  Result<PacketWriter> writer =
      PacketWriter::create({{raw.value(), scales_.size() / sizeof(float)}});
  if (!writer.ok()) return writer.status();
  scales_writer_ = std::move(writer).value();
  return {};
}

std::vector<uint32_t> TernGradExchange::awaiting() const {
  if (scales_missing_ == 0) return ShardedExchange::awaiting();
  std::vector<uint32_t> peers;
  for (uint32_t peer = 0; peer < world_size(); ++peer) {
    if (peer != rank() && scale_arrivals_[peer] == Arrival::kMissing) peers.push_back(peer);
  }
  return peers;
}

Status TernGradExchange::begin_step() {
  if (world_size() == 1) return ShardedExchange::begin_step();
  scales_missing_ = world_size() - 1;
  std::fill(scale_arrivals_.begin(), scale_arrivals_.end(), Arrival::kMissing);
  early_messages_.clear();
  marker_.reset();
  scales_writer_->begin({.role = PacketRole::kPush,
                         .source = static_cast<uint16_t>(rank()),
                         .step = step(),
                         .layout_digest = scales_digest_});
  if (!measure()) {
    for (uint32_t shard = 0; shard < world_size() && !marker_; ++shard) {
      marker_ = find_non_finite(shard);
    }
  }
  if (!marker_) {
    GW_RETURN_IF_ERROR(scales_writer_->add_encoded([&](std::span<std::byte> payload) {
      std::copy(scales_.begin(), scales_.end(), payload.begin());
      return Result<uint64_t>(scales_.size());
    }));
  }
  const std::span<const std::byte> packet =
      marker_ ? scales_writer_->finish_non_finite(*marker_) : scales_writer_->finish();
  for (uint32_t peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    send(peer, PacketRole::kPush, packet);
    counted().scale_bytes_sent += packet.size();
  }
  return {};
}

bool TernGradExchange::measure() {
  const Timer timer(counted().encode_seconds);
  for (uint32_t i = 0; i < trits_.size(); ++i) {
    const std::span<const float> x = values(segment(i));
    if (!trits_[i] || x.empty()) {
      if (execution().kernels().absmax(x.data(), x.size()) >= kNonFiniteBits) return false;
      continue;
    }
    Result<float> limit =
        measure_scales(segment(i).push_codec->info(), trits_[i]->shape, trits_[i]->parameters.clip,
                       x, ResidualView(), scales_of(*trits_[i]), execution());
    if (!limit.ok()) return false;
    trits_[i]->limit = limit.value();
  }
  return true;
}

Status TernGradExchange::receive(uint32_t peer, std::span<const std::byte> message) {
  Result<Packet> parsed = parse_packet(message);
  if (!parsed.ok()) {
    return {parsed.status().code(),
            "message from rank " + std::to_string(peer) + ": " + parsed.status().message()};
  }
  if (parsed.value().header.layout_digest == scales_digest_) {
    return take_scales(peer, parsed.value(), message.size());
  }
  if (scales_missing_ == 0) return ShardedExchange::receive(peer, message);
  if (auto shard = shard_of(peer, parsed.value()); !shard.ok()) return shard.status();
  early_messages_.emplace_back(peer, std::vector(message.begin(), message.end()));
  return {};
}

Status TernGradExchange::take_scales(uint32_t peer, const Packet& packet, uint64_t size) {
  const std::string from = "rank " + std::to_string(peer);
  if (peer >= world_size() || peer == rank()) return unexpected(from + " is no peer");
  if (done()) return unexpected(from + " sent a message, but no step is under way");
  if (packet.header.source != peer || packet.header.step != step()) {
    return unexpected(from + " sent the scales of rank " + std::to_string(packet.header.source) +
                      ", step " + std::to_string(packet.header.step) + "; rank " +
                      std::to_string(rank()) + " is at step " + std::to_string(step()));
  }
  if (scale_arrivals_[peer] == Arrival::kHere) {
    return unexpected(from + " sent its scales of this step twice");
  }
  scale_arrivals_[peer] = Arrival::kHere;
  --scales_missing_;
  counted().push_bytes_received += size;
  if (packet.non_finite) {
    if (!marker_ || peer < marker_->rank) {
      marker_ = packet.non_finite;
      marker_->rank = peer;
    }
  } else {
    if (packet.frames.size() != 1 || packet.frames[0].payload.size() != scales_.size()) {
      return {StatusCode::kPeerMismatch, from + "'s scales are not those of the layout"};
    }
    for (uint64_t at = 0; at < scales_.size(); at += sizeof(float)) {
      const auto bits = load_le<uint32_t>(packet.frames[0].payload.data() + at);
      if (bits >= kNonFiniteBits) {
        return {StatusCode::kCorruptPayload, from + " sent a scale that is negative or not finite"};
      }
      store_le(scales_.data() + at, std::max(bits, load_le<uint32_t>(scales_.data() + at)));
    }
  }
  return scales_missing_ == 0 ? start_pushes() : Status();
}

Status TernGradExchange::start_pushes() {
  if (marker_) {
    for (uint32_t shard = 0; shard < world_size(); ++shard) void_shard(shard, *marker_);
  } else {
    GW_RETURN_IF_ERROR(add_own_trits());
    GW_RETURN_IF_ERROR(ShardedExchange::begin_step());
  }
  for (const auto& [peer, message] : std::exchange(early_messages_, {})) {
    GW_RETURN_IF_ERROR(ShardedExchange::receive(peer, message));
  }
  return {};
}

uint64_t TernGradExchange::draw(uint32_t i, std::span<std::byte> payload) {
  const Trits& trits = *trits_[i];
  std::copy_n(scales_of(trits), trits.shape.buckets.count * sizeof(float), payload.begin());
  return draw_with_scales(trits.shape, trits.limit, values(segment(i)), ResidualView(),
                          draw_context(i), payload, execution());
}

Status TernGradExchange::add_own_trits() {
  const Timer timer(counted().encode_seconds);
  for (uint32_t i = 0; i < trits_.size(); ++i) {
    if (!trits_[i] || !owns(i)) continue;
    std::ranges::fill(trits_[i]->sums, int8_t{0});
    const uint64_t size = draw(i, own_payload_);
    GW_RETURN_IF_ERROR(add_trits(trits_[i]->shape, segment(i).push_codec->info().name,
                                 std::span(own_payload_).first(size), trits_[i]->sums,
                                 execution()));
  }
  return {};
}

Status TernGradExchange::encode_segment(uint32_t i, PacketWriter& writer) {
  if (!trits_[i]) return ShardedExchange::encode_segment(i, writer);
  return writer.add_encoded([&](std::span<std::byte> payload) -> Result<uint64_t> {
    if (!owns(i)) return draw(i, payload);
    const QsgdShape shape = *qsgd_shape(*segment(i).pull_codec, segment(i).n);
    return encode_trit_sums(shape, trits_[i]->shape.buckets, scales_of(*trits_[i]), trits_[i]->sums,
                            payload, execution());
  });
}

Status TernGradExchange::decode_segment(uint32_t i, const PacketHeader& header,
                                        std::span<const std::byte> payload, DecodeMode mode) {
  if (!trits_[i] || header.role == PacketRole::kPull) {
    return ShardedExchange::decode_segment(i, header, payload, mode);
  }
  Trits& trits = *trits_[i];
  const uint64_t count = trits.shape.buckets.count;
  const std::span<const std::byte> shared(scales_of(trits), count * sizeof(float));
  const bool same = all_zero(shared.data(), count)
                        ? payload.empty()
                        : payload.size() >= shared.size() &&
                              std::memcmp(payload.data(), shared.data(), shared.size()) == 0;
  if (!same) {
    return {StatusCode::kPeerMismatch, "rank " + std::to_string(header.source) +
                                           " pushed tensor '" +
                                           layout().tensors()[segment(i).tensor].name +
                                           "' with other scales than were shared"};
  }
  return add_trits(trits.shape, segment(i).push_codec->info().name, payload, trits.sums,
                   execution());
}

Status refuse(const Layout& layout, const Segment& segment, const std::string& why) {
  return {StatusCode::kInvalidArgument,
          "exchange terngrad: tensor '" + layout.tensors()[segment.tensor].name + "', push " +
              segment.push_codec->text() + ", pull " + segment.pull_codec->text() + ": " + why};
}

// What the segment's pulls go by.
Result<std::shared_ptr<const Codec>> pull_codec(const Layout& layout, const Segment& segment) {
  if (segment.push_codec->residual_type() != ResidualType::kNone ||
      segment.pull_codec->residual_type() != ResidualType::kNone) {
    return refuse(layout, segment,
                  "no residual is kept, as the mean of the draws is the gradient; add ef=off");
  }
  const auto parameters = terngrad_parameters(*segment.push_codec);
  if (!parameters) return segment.pull_codec;
  const std::string levels = std::to_string(layout.world_size());
  if (segment.pull_codec->text() == segment.push_codec->text()) {
    const uint32_t bucket = parameters->bucket == 0 ? kWholeSegment : parameters->bucket;
    return Codec::parse("qsgd:levels=" + levels + ",bucket=" + std::to_string(bucket));
  }
  const auto shape = qsgd_shape(*segment.pull_codec, segment.n);
  if (!shape || shape->levels != static_cast<int32_t>(layout.world_size()) ||
      !buckets_fit(parameters->shape(segment.n).buckets, shape->buckets)) {
    return refuse(layout, segment,
                  "sums of trits are pulled by the same codec or by qsgd with levels=" + levels +
                      " and buckets that have one scale");
  }
  return segment.pull_codec;
}

Result<Layout> with_pulled_sums(const Layout& layout) {
  if (layout.world_size() > kLargestLevel) {
    return Status(StatusCode::kInvalidArgument,
                  "exchange terngrad: at most " + std::to_string(kLargestLevel) +
                      " ranks, as a sum of trits has 8 bits; the layout has " +
                      std::to_string(layout.world_size()));
  }
  std::vector<std::shared_ptr<const Codec>> codecs;
  for (const Segment& segment : layout.segments()) {
    Result<std::shared_ptr<const Codec>> codec = pull_codec(layout, segment);
    if (!codec.ok()) return codec.status();
    codecs.push_back(codec.value());
  }
  return layout.with_pull_codecs(codecs);
}

}  // namespace

Result<std::unique_ptr<Exchange>> make_terngrad_exchange(
    const std::shared_ptr<const Layout>& layout, uint32_t rank, Execution execution,
    uint64_t seed) {
  GW_RETURN_IF_ERROR(check_rank(*layout, rank));
  Result<Layout> changed = with_pulled_sums(*layout);
  if (!changed.ok()) return changed.status();
  auto exchange = std::make_unique<TernGradExchange>(
      std::make_shared<const Layout>(std::move(changed).value()), rank, std::move(execution), seed);
  GW_RETURN_IF_ERROR(exchange->prepare());
  return std::unique_ptr<Exchange>(std::move(exchange));
}

}  // namespace gradwire
