#include "exchange/packet_exchange.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/checksum.h"
#include "base/return_if_error.h"
#include "exchange/timer.h"
#include "stages/element.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

// A step in so many is measured for the error norm; each costs a pass over the bucket.
constexpr uint64_t kErrorNormInterval = 64;
// Values a step of the finite check that threads take one by one.
constexpr uint64_t kScanPiece = 65536;

double squared_distance(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = double{a[i]} - double{b[i]};
    sum += difference * difference;
  }
  return sum;
}

}  // namespace

Status unexpected(const std::string& what) { return {StatusCode::kUnexpectedMessage, what}; }

Status check_start(const Exchange& exchange, uint64_t values) {
  if (!exchange.done()) return unexpected("start: the step before has not ended");
  const uint64_t expected = exchange.layout().numel();
  if (values == expected) return {};
  return {StatusCode::kLengthMismatch, "start: the layout has " + std::to_string(expected) +
                                           " values, the bucket " + std::to_string(values)};
}

Status check_rank(const Layout& layout, uint32_t rank) {
  if (layout.servers() > 0) {
    return {StatusCode::kInvalidArgument, "a layout with servers is for the server exchange alone"};
  }
  if (rank < layout.world_size()) return {};
  return {StatusCode::kInvalidArgument, "rank " + std::to_string(rank) +
                                            " is not below the world size " +
                                            std::to_string(layout.world_size())};
}

uint64_t draw_stream(const Layout& layout, uint32_t rank, const Segment& segment) {
  const uint64_t place[] = {rank, segment.tensor_offset};
  return digest64({std::as_bytes(std::span(place)),
                   std::as_bytes(std::span(layout.tensors()[segment.tensor].name))});
}

PacketExchange::PacketExchange(std::shared_ptr<const Layout> layout, uint32_t rank,
                               Execution execution, uint64_t seed, Reduction reduction)
    : layout_(std::move(layout)),
      rank_(rank),
      execution_(std::move(execution)),
      seed_(seed),
      reduction_(reduction),
      shards_(layout_->world_size()) {}

Status PacketExchange::prepare() {
  const std::vector<Segment>& segments = layout_->segments();
  for (uint32_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    shards_[segment.owner].push_back(i);
    // A lone rank sends nothing, so it loses nothing.
    const ResidualType type = world_size() == 1 || !encodes(segment.owner)
                                  ? ResidualType::kNone
                                  : codec_of(segment).residual_type();
    residuals_.emplace_back(type, segment.n);
    streams_.push_back(draw_stream(*layout_, rank_, segment));
    // The same verdict on every rank: whoever sees NaN must say so if anybody keeps a residual.
    keeps_residuals_ |=
        world_size() > 1 && (segment.push_codec->residual_type() != ResidualType::kNone ||
                             segment.pull_codec->residual_type() != ResidualType::kNone);
  }
  const std::string description = describe();
  for (uint64_t shard = 0; shard < world_size(); ++shard) {
    std::vector<PacketWriter::Segment> shapes;
    for (uint32_t i : shards_[shard]) {
      if (!encodes(segments[i].owner)) continue;
      const Codec& codec = codec_of(segments[i]);
      shapes.push_back(
          {&codec == segments[i].pull_codec.get() ? segments[i].pull_codec : segments[i].push_codec,
           segments[i].n});
    }
    Result<PacketWriter> writer = PacketWriter::create(std::move(shapes));
    if (!writer.ok()) return writer.status();
    writers_.push_back(std::move(writer).value());
    digests_.push_back(digest64({std::as_bytes(std::span(description)),
                                 std::as_bytes(std::span<const uint64_t>(&shard, 1))}));
  }
  return {};
}

std::string PacketExchange::describe() const {
  return "exchange " + name() + (reduction_ == Reduction::kSum ? ", sum" : "") + "\n" +
         layout_->describe();
}

Status PacketExchange::start(std::span<float> bucket, uint64_t step) {
  GW_RETURN_IF_ERROR(check_start(*this, bucket.size()));
  bucket_ = bucket;
  step_ = step;
  ++stats_.steps;
  non_finite_.reset();
  outgoing_.clear();
  for (uint32_t shard = 0; shard < world_size(); ++shard) writers_[shard].begin(header(shard));
  return begin_step();
}

std::vector<OutgoingMessage> PacketExchange::take_outgoing() {
  return std::exchange(outgoing_, {});
}

const Codec& PacketExchange::codec_of(const Segment& segment) const {
  return owns(segment.owner) ? *segment.pull_codec : *segment.push_codec;
}

PacketHeader PacketExchange::header(uint32_t shard) const {
  return {.role = owns(shard) ? PacketRole::kPull : PacketRole::kPush,
          .source = static_cast<uint16_t>(rank_),
          .step = step_of(shard),
          .layout_digest = digests_[shard]};
}

bool PacketExchange::pay_residuals() {
  if (!keeps_residuals_) return true;
  if (find_non_finite(rank_)) return false;  // the step will be skipped
  for (uint32_t i : shards_[rank_]) {
    const std::vector<float> owed = residuals_[i].values();
    execution_.kernels().add_f32(owed.data(), owed.size(), values(layout_->segments()[i]).data());
    residuals_[i] = Residual();
  }
  keeps_residuals_ = false;
  return true;
}

std::optional<NonFiniteOrigin> PacketExchange::find_non_finite(uint32_t shard) {
  for (uint32_t i : shards_[shard]) {
    const std::span<const float> x = values(layout_->segments()[i]);
    const uint64_t pieces = (x.size() + kScanPiece - 1) / kScanPiece;
    std::vector<uint32_t> largest(pieces);
    execution_.for_each(pieces, [&](size_t piece) {
      const std::span<const float> part = x.subspan(
          piece * kScanPiece, std::min<uint64_t>(kScanPiece, x.size() - piece * kScanPiece));
      largest[piece] = execution_.kernels().absmax(part.data(), part.size());
    });
    if (std::none_of(largest.begin(), largest.end(),
                     [](uint32_t bits) { return bits >= kNonFiniteBits; })) {
      continue;
    }
    const auto bad = std::find_if(x.begin(), x.end(), [](float v) { return !std::isfinite(v); });
    return NonFiniteOrigin{
        .rank = rank_, .segment = i, .element = static_cast<uint64_t>(bad - x.begin())};
  }
  return std::nullopt;
}

Result<uint32_t> PacketExchange::shard_of(uint32_t peer, const Packet& packet) const {
  const std::string from = "rank " + std::to_string(peer);
  if (done()) return unexpected(from + " sent a message, but no step is under way");
  Result<uint32_t> shard = shard_of_any_step(peer, packet);
  const PacketHeader& header = packet.header;
  if (shard.ok() && header.step != step_) {
    return unexpected(from + " sent its " + (header.role == PacketRole::kPush ? "push" : "pull") +
                      " of step " + std::to_string(header.step) + ", rank " +
                      std::to_string(rank_) + " is at step " + std::to_string(step_));
  }
  return shard;
}

Result<uint32_t> PacketExchange::shard_of_any_step(uint32_t peer, const Packet& packet) const {
  const PacketHeader& header = packet.header;
  const std::string from = "rank " + std::to_string(peer);
  const bool push = header.role == PacketRole::kPush;
  if (peer >= world_size() || peer == rank_) return unexpected(from + " is no peer");
  const auto found = std::find(digests_.begin(), digests_.end(), header.layout_digest);
  if (found == digests_.end()) {
    return Status(
        StatusCode::kPeerMismatch,
        from + " works with another exchange, layout or codec than rank " + std::to_string(rank_));
  }
  const auto shard = static_cast<uint32_t>(found - digests_.begin());
  const uint32_t source = push ? peer : shard;
  if (header.source != source) {
    return unexpected(from + " handed over a message of rank " + std::to_string(header.source));
  }
  if (!packet.non_finite) GW_RETURN_IF_ERROR(check_frames(peer, packet, shard));
  return shard;
}

Status PacketExchange::check_frames(uint32_t peer, const Packet& packet, uint32_t shard) const {
  const std::vector<uint32_t>& expected = shards_[shard];
  const bool push = packet.header.role == PacketRole::kPush;
  bool same = packet.frames.size() == expected.size();
  for (size_t k = 0; same && k < expected.size(); ++k) {
    const Segment& segment = layout_->segments()[expected[k]];
    const Codec& codec = push ? *segment.push_codec : *segment.pull_codec;
    same = packet.frames[k].n == segment.n && packet.frames[k].codec == codec.wire();
  }
  if (same) return {};
  return {StatusCode::kPeerMismatch,
          "the frames of rank " + std::to_string(peer) + "'s packet are not those of the layout"};
}

Result<std::optional<NonFiniteOrigin>> PacketExchange::encode(uint32_t shard) {
  const Timer timer(stats_.encode_seconds);
  for (uint32_t i : shards_[shard]) {
    const Segment& segment = layout_->segments()[i];
    const Status status = encode_segment(i, writers_[shard]);
    if (status.code() == StatusCode::kNonFinite) {
      put_back(shard);
      const std::span<const float> x = values(segment);
      const auto bad = std::ranges::find_if(x, [](float v) { return !std::isfinite(v); });
      // With a residual the sum may be too large where the input is not: then no element is named.
      const auto element = static_cast<uint64_t>(bad == x.end() ? 0 : bad - x.begin());
      return std::optional(NonFiniteOrigin{.rank = rank_, .segment = i, .element = element});
    }
    GW_RETURN_IF_ERROR(status);
    (owns(shard) ? stats_.values_pulled : stats_.values_pushed) += segment.n;
  }
  return std::optional<NonFiniteOrigin>();
}

Status PacketExchange::encode_segment(uint32_t i, PacketWriter& writer) {
  return writer.add(values(layout_->segments()[i]), residuals_[i].view(), draw_context(i),
                    execution_);
}

void PacketExchange::put_back(uint32_t shard) {
  for (size_t k = 0; k < writers_[shard].added(); ++k) {
    put_back_segment(shards_[shard][k], writers_[shard].payload(k));
  }
  writers_[shard].begin(header(shard));
}

void PacketExchange::put_back(uint32_t shard, const Packet& packet) {
  for (size_t k = 0; k < packet.frames.size(); ++k) {
    put_back_segment(shards_[shard][k], packet.frames[k].payload);
  }
}

void PacketExchange::put_back_segment(uint32_t i, std::span<const std::byte> payload) {
  if (residuals_[i].type() == ResidualType::kNone) return;
  const Segment& segment = layout_->segments()[i];
  std::vector<float> sent(segment.n);
  if (codec_of(segment).decode(payload, sent, DecodeMode::kStore, execution_).ok()) {
    residuals_[i].add(0, sent, 1.0f);
  }
}

std::span<const std::byte> PacketExchange::finish(uint32_t shard,
                                                  const std::optional<NonFiniteOrigin>& poison) {
  const std::span<const std::byte> packet =
      poison ? writers_[shard].finish_non_finite(*poison) : writers_[shard].finish();
  if (owns(shard)) stats_.pull_bytes_encoded += packet.size();
  return packet;
}

void PacketExchange::send(uint32_t peer, PacketRole role, std::span<const std::byte> packet) {
  (role == PacketRole::kPush ? stats_.push_bytes_sent : stats_.pull_bytes_sent) += packet.size();
  outgoing_.push_back({.peer = peer, .bytes = packet});
}

void PacketExchange::send(uint32_t peer, PacketRole role, const SharedBytes& packet) {
  send(peer, role, std::span(*packet));
  outgoing_.back().keep = packet;
}

Status PacketExchange::decode(uint32_t shard, const Packet& packet, DecodeMode mode) {
  const Timer timer(stats_.decode_seconds);
  for (size_t k = 0; k < packet.frames.size(); ++k) {
    GW_RETURN_IF_ERROR(
        decode_segment(shards_[shard][k], packet.header, packet.frames[k].payload, mode));
  }
  return {};
}

Status PacketExchange::decode_segment(uint32_t i, const PacketHeader& header,
                                      std::span<const std::byte> payload, DecodeMode mode) {
  const Segment& segment = layout_->segments()[i];
  const Codec& codec = header.role == PacketRole::kPush ? *segment.push_codec : *segment.pull_codec;
  return codec.decode(payload, values(segment), mode, execution_);
}

void PacketExchange::finish_sum(uint32_t shard) {
  if (reduction_ == Reduction::kAverage) divide(shard, static_cast<float>(world_size()));
}

void PacketExchange::divide(uint32_t shard, float divisor) {
  const Timer timer(stats_.decode_seconds);
  for (uint32_t i : shards_[shard]) {
    const std::span<float> x = values(layout_->segments()[i]);
    execution_.kernels().divide(x.data(), x.size(), divisor);
  }
}

Status PacketExchange::decode_own(uint32_t shard) {
  const Timer timer(stats_.decode_seconds);
  for (size_t k = 0; k < shards_[shard].size(); ++k) {
    const Segment& segment = layout_->segments()[shards_[shard][k]];
    GW_RETURN_IF_ERROR(codec_of(segment).decode(writers_[shard].payload(k), values(segment),
                                                DecodeMode::kStore, execution_));
  }
  return {};
}

void PacketExchange::void_shard(uint32_t shard, const NonFiniteOrigin& origin) {
  for (uint32_t i : shards_[shard]) {
    std::ranges::fill(values(layout_->segments()[i]), std::numeric_limits<float>::quiet_NaN());
  }
  if (non_finite_) return;
  ++stats_.non_finite_steps;
  // The indices came over the wire.
  if (origin.segment >= layout_->segments().size()) {
    non_finite_ = NonFiniteInput{.rank = origin.rank, .tensor = "?", .element = origin.element};
    return;
  }
  const Segment& segment = layout_->segments()[origin.segment];
  non_finite_ = NonFiniteInput{.rank = origin.rank,
                               .tensor = layout_->tensors()[segment.tensor].name,
                               .element = segment.tensor_offset + origin.element};
}

void PacketExchange::sample_error_norm() {
  if (stats_.steps % kErrorNormInterval != 1) return;
  const Timer timer(stats_.encode_seconds);
  double error = 0;
  double input = 0;
  std::vector<float> decoded;
  for (uint32_t shard = 0; shard < world_size(); ++shard) {
    if (owns(shard)) continue;
    for (size_t k = 0; k < writers_[shard].added(); ++k) {
      const uint32_t i = shards_[shard][k];
      const Segment& segment = layout_->segments()[i];
      const std::span<const float> x = values(segment);
      input += squared_distance(x, std::vector<float>(x.size()));
      if (residuals_[i].type() != ResidualType::kNone) {
        error += residuals_[i].squared_norm();
        continue;
      }
      decoded.resize(segment.n);
      if (segment.push_codec
              ->decode(writers_[shard].payload(k), decoded, DecodeMode::kStore, execution_)
              .ok()) {
        error += squared_distance(x, decoded);
      }
    }
  }
  if (!(input > 0)) return;
  stats_.error_norm_sum += std::sqrt(error / input);
  ++stats_.error_norm_samples;
}

}  // namespace gradwire
