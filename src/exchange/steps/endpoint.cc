#include "exchange/steps/endpoint.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/checksum.h"
#include "base/return_if_error.h"
#include "exchange/steps/timer.h"

namespace gradwire {
namespace {

// The error norm is sampled once in so many steps, as each sample costs a pass over the bucket. The
// first sample waits until residuals have grown.
constexpr uint64_t kErrorNormInterval = 64;
constexpr uint64_t kFirstErrorNorm = 16;

// The frames of a shard's packet.
std::vector<PacketWriter::Segment> frames_of(const Shards& shards, uint32_t shard,
                                             Direction direction) {
  std::vector<PacketWriter::Segment> frames;
  for (uint32_t i : shards.segments[shard]) {
    frames.push_back({shards.codec(i, direction), shards.segment(i).n});
  }
  return frames;
}

}  // namespace

uint64_t shard_digest(std::string_view description, uint64_t shard) {
  return digest64(std::as_bytes(std::span(description)),
                  std::as_bytes(std::span<const uint64_t>(&shard, 1)));
}

Status check_not_padded(const Layout& layout) {
  if (layout.cut() == Cut::kEvenly) return {};
  return {StatusCode::kInvalidArgument,
          "tensors that are cut into rows are for exchanges in which each shard has one owner: "
          "sharded, ring, reduce-scatter, allgather"};
}

std::string describe_exchange(const ExchangeSetup& setup, const std::string& name) {
  return "exchange " + name + (setup.options.reduction == Reduction::kSum ? ", sum" : "") + "\n" +
         setup.layout->describe();
}

Endpoint::Endpoint(const ExchangeSetup& setup, std::string description)
    : shards_(std::make_shared<const Shards>(setup.layout, setup.rank, setup.options.seed)),
      ranks_(*shards_),
      origins_(shards_, setup.origins),
      description_(std::move(description)),
      reduction_(setup.options.reduction),
      marks_non_finite_(setup.marks_non_finite),
      traffic_(setup.layout->tensors().size()) {}

Result<Endpoint> Endpoint::create(const ExchangeSetup& setup, std::string description) {
  Endpoint endpoint(setup, std::move(description));
  const Shards& shards = *endpoint.shards_;
  for (uint32_t shard : endpoint.ranks_.shards()) {
    const bool is_encoded = shards.is_encoded(shard);
    GW_ASSIGN_OR_RETURN(
        PacketWriter writer,
        PacketWriter::create(is_encoded ? frames_of(shards, shard, shards.direction(shard))
                                        : std::vector<PacketWriter::Segment>()));
    endpoint.writers_.push_back(std::move(writer));
    endpoint.add_round(
        std::max(PacketWriter::max_size(frames_of(shards, shard, Direction::kPush)),
                 PacketWriter::max_size(frames_of(shards, shard, Direction::kPull))));
  }
  GW_ASSIGN_OR_RETURN(endpoint.codec_, setup.codecs(endpoint.shards_));
  endpoint.residuals_ = Residuals(endpoint.shards_, *endpoint.codec_, endpoint.reduction_);
  return endpoint;
}

uint32_t Endpoint::add_round(uint64_t max_size) {
  max_message_size_ = std::max(max_message_size_, max_size);
  digests_.push_back(shard_digest(description_, digests_.size()));
  return static_cast<uint32_t>(digests_.size() - 1);
}

uint64_t Endpoint::values_in(uint32_t shard) const {
  uint64_t values = 0;
  for (uint32_t i : shards_->segments[shard]) values += shards_->segment(i).n;
  return values;
}

void Endpoint::lend(std::span<float> bucket) {
  bucket_ = bucket;
  codec_->begin(bucket);
}

void Endpoint::begin(std::span<float> bucket, uint64_t step) {
  lend(bucket);
  step_ = step;
  ++stats_.steps;
  origins_.begin();
  outgoing_.clear();
  for (uint32_t shard : ranks_.shards()) set_step(shard, step);
  // On the way around a ring the values become sums, which may be much larger than gradients.
  for (uint32_t shard : ranks_.shards()) {
    if (!owns(shard)) examine_residual(shard);
  }
}

void Endpoint::set_step(uint32_t shard, uint64_t step) {
  writers_[shard].begin({.direction = shards_->direction(shard),
                         .source = static_cast<uint16_t>(ranks_.own()),
                         .step = step,
                         .layout_digest = digests_[shard]});
}

void Endpoint::set_events(StepEvents events) {
  codec_->wait_by(events.arrive);
  events_ = std::move(events);
}

void Endpoint::finish_values(uint32_t shard) const {
  if (!events_.finished) return;
  uint64_t begin = 0;
  uint64_t end = 0;
  for (uint32_t i : shards_->segments[shard]) {
    const Segment& segment = shards_->segment(i);
    if (segment.bucket_offset != end) {
      if (end > begin) events_.finished(begin, end - begin);
      begin = segment.bucket_offset;
    }
    end = segment.bucket_offset + segment.n;
  }
  if (end > begin) events_.finished(begin, end - begin);
}

std::vector<OutgoingMessage> Endpoint::take_outgoing() { return std::exchange(outgoing_, {}); }

Result<ReceivedPacket> Endpoint::open(uint32_t peer, std::span<const std::byte> message) {
  const std::string from = name_of(peer);
  Result<Packet> parsed = parse_packet(message);
  if (!parsed.ok()) {
    const bool damaged = parsed.status().code() == StatusCode::kChecksumMismatch;
    return Status(parsed.status().code(),
                  "message from " + from + ": " + parsed.status().message() +
                      (damaged ? "; it was damaged on the way, or in the memory of a rank" : ""));
  }
  const PacketHeader& header = parsed.value().header;
  if (!ranks_.is_peer(peer)) return unexpected(from + " is no peer");
  const auto found = std::ranges::find(digests_, header.layout_digest);
  if (found == digests_.end()) {
    return Status(StatusCode::kPeerMismatch, from + " works with another exchange, layout or " +
                                                 "codec than " + name_of(ranks_.own()));
  }
  const auto shard = static_cast<uint32_t>(found - digests_.begin());
  const bool of_owner = header.direction == Direction::kPull && shard < ranks_.shards().size();
  if (header.source != (of_owner ? shard : peer)) {
    return unexpected(from + " handed over a message of " + name_of(header.source));
  }
  ReceivedPacket received = {
      .peer = peer, .shard = shard, .packet = std::move(parsed).value(), .message = message};
  GW_RETURN_IF_ERROR(check_frames(received));
  (received.is_push() ? stats_.push_bytes_received : stats_.pull_bytes_received) += message.size();
  if (shard < ranks_.shards().size()) stats_.values_received += values_in(shard);
  return received;
}

Status Endpoint::check_step(const ReceivedPacket& received, bool done) const {
  const PacketHeader& header = received.packet.header;
  const std::string from = name_of(received.peer);
  if (done) return unexpected(from + " sent a message, but no step is under way");
  if (header.step == step_) return {};
  return unexpected(from + " sent its " + direction_name(header.direction) + " of step " +
                    std::to_string(header.step) + ", " + name_of(ranks_.own()) + " is at step " +
                    std::to_string(step_) + "; all ranks must take the same number of steps, " +
                    "and after a restart begin with checkpoints of the same step");
}

Status Endpoint::check_frames(const ReceivedPacket& received) const {
  if (received.packet.non_finite || received.shard >= ranks_.shards().size()) return {};
  const Packet& packet = received.packet;
  const std::vector<uint32_t>& expected = shards_->segments[received.shard];
  const auto fits = [&](const PacketFrame& frame, uint32_t i) {
    return frame.n == shards_->segment(i).n &&
           frame.codec == shards_->codec(i, packet.header.direction)->wire();
  };
  if (std::ranges::equal(packet.frames, expected, fits)) return {};
  return {StatusCode::kPeerMismatch,
          "the frames of " + name_of(received.peer) + "'s packet are not those of the layout"};
}

Result<FirstNonFinite> Endpoint::find_non_finite(std::span<const uint32_t> shards) {
  const Timer timer(stats_.encode_seconds);
  if (const FirstNonFinite known = origins_.known()) return known;
  GW_ASSIGN_OR_RETURN(const FirstNonFinite origin, codec_->find_non_finite(shards));
  return origins_.in_marker(origin);
}

Result<FirstNonFinite> Endpoint::encode(std::span<const uint32_t> shards,
                                        std::span<const uint32_t> finite,
                                        const ShardCodec::Encoded& each) {
  const Timer timer(stats_.encode_seconds);
  if (const FirstNonFinite known = origins_.known()) return known;
  const uint64_t step = shards.empty() ? step_ : encoded(shards[0]).header.step;
  if (std::ranges::find(shards, ranks_.own()) != shards.end()) examine_residual(ranks_.own());
  double elsewhere = 0;
  const auto after_shard = [&](uint32_t shard) {
    count_encoded(shard);
    const Timer other(elsewhere);
    if (each) each(shard);
  };
  GW_ASSIGN_OR_RETURN(const FirstNonFinite origin,
                      codec_->encode(shards, finite, step, writers_, after_shard));
  stats_.encode_seconds -= elsewhere;
  return origin ? origins_.in_marker(origin) : origin;
}

void Endpoint::count_encoded(uint32_t shard) {
  const Packet packet = encoded(shard);
  const bool pull = owns(shard);
  // Each peer gets the packet of the segments that no rank owns.
  const uint64_t copies = shard == ranks_.count() ? ranks_.peers().size() : 1;
  for (size_t k = 0; k < packet.frames.size(); ++k) {
    const uint64_t n = copies * packet.frames[k].n;
    const uint64_t bytes = copies * packet.frames[k].payload.size();
    const uint32_t segment = shards_->segments[shard][k];
    TensorTraffic& tensor = traffic_[shards_->segment(segment).tensor];
    (pull ? tensor.values_pulled : tensor.values_pushed) += n;
    (pull ? tensor.pull_payload_bytes : tensor.push_payload_bytes) += bytes;
    (pull ? stats_.values_pulled : stats_.values_pushed) += n;
    if (!shards_->compressed[segment]) continue;
    (pull ? stats_.values_pulled_compressed : stats_.values_pushed_compressed) += n;
    (pull ? stats_.pull_payload_bytes : stats_.push_payload_bytes) += bytes;
  }
}

void Endpoint::examine_residual(uint32_t shard) {
  residuals_.examine(shard, step_, stats_.steps);
  stats_.outgrown_residuals = residuals_.outgrown().size();
}

Status Endpoint::decode(uint32_t shard, std::span<const Packet* const> packets, DecodeMode mode,
                        const ShardCodec::Next& next) {
  const Timer timer(stats_.decode_seconds);
  return codec_->decode(shard, packets, mode, next);
}

Status Endpoint::decode(uint32_t shard, const Packet& packet, DecodeMode mode,
                        const ShardCodec::Next& next) {
  const Packet* const packets[] = {&packet};
  return decode(shard, packets, mode, next);
}

void Endpoint::divide(uint32_t shard, float divisor) {
  const Timer timer(stats_.decode_seconds);
  codec_->divide(shard, divisor);
}

void Endpoint::put_back(uint32_t shard) {
  codec_->put_back(shard, encoded(shard));
  writers_[shard].restart();
}

void Endpoint::sample_error_norm() {
  if (stats_.steps % kErrorNormInterval != kFirstErrorNorm) return;
  const Timer timer(stats_.encode_seconds);
  ShardCodec::Norms norms;
  for (uint32_t shard : ranks_.shards()) {
    if (!owns(shard)) codec_->add_norms(shard, encoded(shard), norms);
  }
  if (!(norms.input > 0)) return;
  stats_.error_norm_sum += std::sqrt(norms.error / norms.input);
  ++stats_.error_norm_samples;
}

std::span<const std::byte> Endpoint::finish(uint32_t shard, const FirstNonFinite& origin) {
  const std::span<const std::byte> packet =
      origin ? writers_[shard].finish_non_finite(*origin) : writers_[shard].finish();
  if (owns(shard)) stats_.pull_bytes_encoded += packet.size();
  return packet;
}

void Endpoint::send(uint32_t peer, Direction direction, std::span<const std::byte> packet) {
  (direction == Direction::kPush ? stats_.push_bytes_sent : stats_.pull_bytes_sent) +=
      packet.size();
  hand_out({.peer = peer, .bytes = packet});
}

void Endpoint::hand_out(OutgoingMessage message) {
  if (events_.send) {
    events_.send(message);
  } else {
    outgoing_.push_back(std::move(message));
  }
}

void Endpoint::send_scales(uint32_t peer, Direction direction, std::span<const std::byte> packet) {
  send(peer, direction, packet);
  stats_.scale_bytes_sent += packet.size();
}

void Endpoint::send(uint32_t peer, Direction direction, const SharedBytes& packet) {
  (direction == Direction::kPush ? stats_.push_bytes_sent : stats_.pull_bytes_sent) +=
      packet->size();
  hand_out({.peer = peer, .bytes = *packet, .keep = packet});
}

void Endpoint::mark_non_finite(uint32_t shard, const NonFiniteOrigin& origin) {
  codec_->fill_nan(shard);
  if (origins_.note(origin)) ++stats_.non_finite_steps;
}

}  // namespace gradwire
