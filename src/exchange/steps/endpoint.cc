#include "exchange/steps/endpoint.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
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

Status unexpected(const std::string& what) { return {StatusCode::kUnexpectedMessage, what}; }

std::string name_of(uint32_t rank) { return "rank " + std::to_string(rank); }

uint64_t shard_digest(std::string_view description, uint64_t shard) {
  return digest64(std::as_bytes(std::span(description)),
                  std::as_bytes(std::span<const uint64_t>(&shard, 1)));
}

Status check_rank(const Layout& layout, uint32_t rank) {
  if (layout.servers() > 0) {
    return {StatusCode::kInvalidArgument, "a layout with servers is for the server exchange alone"};
  }
  if (rank < layout.world_size()) return {};
  return {StatusCode::kInvalidArgument,
          name_of(rank) + " is not below the world size " + std::to_string(layout.world_size())};
}

Status check_not_padded(const Layout& layout) {
  if (layout.cut() == Cut::kEvenly) return {};
  return {StatusCode::kInvalidArgument,
          "tensors that are cut into rows are for exchanges in which each shard has one owner: "
          "sharded, ring, reduce-scatter, allgather"};
}

void ReceivedPacket::keep() {
  if (kept || message.empty()) return;
  kept = std::make_shared<const std::vector<std::byte>>(message.begin(), message.end());
  for (PacketFrame& frame : packet.frames) {
    frame.payload = {kept->data() + (frame.payload.data() - message.data()), frame.payload.size()};
  }
  message = *kept;
}

std::string describe_exchange(const ExchangeSetup& setup, const std::string& name) {
  return "exchange " + name + (setup.options.reduction == Reduction::kSum ? ", sum" : "") + "\n" +
         setup.layout->describe();
}

Result<Endpoint> Endpoint::create(const ExchangeSetup& setup, std::string description) {
  const ExchangeOptions& options = setup.options;
  Endpoint endpoint;
  endpoint.shards_ = std::make_shared<const Shards>(setup.layout, setup.rank, options.seed);
  const Shards& shards = *endpoint.shards_;
  endpoint.description_ = std::move(description);
  endpoint.reduction_ = options.reduction;
  endpoint.keeps_residuals_ = any_residuals(*shards.layout);
  endpoint.marks_non_finite_ = setup.marks_non_finite;
  endpoint.origins_ = setup.origins;
  endpoint.traffic_.resize(shards.layout->tensors().size());
  endpoint.everyone_.resize(shards.count());
  std::iota(endpoint.everyone_.begin(), endpoint.everyone_.end(), 0u);
  std::ranges::copy_if(endpoint.everyone_, std::back_inserter(endpoint.peers_),
                       [&](uint32_t rank) { return rank != setup.rank; });
  std::ranges::copy_if(endpoint.everyone_, std::back_inserter(endpoint.owners_),
                       [&](uint32_t rank) { return endpoint.is_owner(rank); });
  for (uint32_t shard = 0; shard < shards.segments.size(); ++shard) {
    endpoint.all_shards_.push_back(shard);
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
  non_finite_.reset();
  outgoing_.clear();
  for (uint32_t shard : all_shards_) set_step(shard, step);
  // On the way around a ring the values become sums, which may be much larger than gradients.
  for (uint32_t shard : all_shards_) {
    if (!owns(shard)) watch_residual(shard);
  }
}

void Endpoint::set_step(uint32_t shard, uint64_t step) {
  writers_[shard].begin({.direction = shards_->direction(shard),
                         .source = static_cast<uint16_t>(rank()),
                         .step = step,
                         .layout_digest = digests_[shard]});
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
  if (peer >= world_size() || owns(peer)) return unexpected(from + " is no peer");
  const auto found = std::ranges::find(digests_, header.layout_digest);
  if (found == digests_.end()) {
    return Status(StatusCode::kPeerMismatch, from + " works with another exchange, layout or " +
                                                 "codec than " + name_of(rank()));
  }
  const auto shard = static_cast<uint32_t>(found - digests_.begin());
  const bool of_owner = header.direction == Direction::kPull && shard < all_shards_.size();
  if (header.source != (of_owner ? shard : peer)) {
    return unexpected(from + " handed over a message of " + name_of(header.source));
  }
  ReceivedPacket received = {
      .peer = peer, .shard = shard, .packet = std::move(parsed).value(), .message = message};
  GW_RETURN_IF_ERROR(check_frames(received));
  (received.is_push() ? stats_.push_bytes_received : stats_.pull_bytes_received) += message.size();
  if (shard < all_shards_.size()) stats_.values_received += values_in(shard);
  return received;
}

Status Endpoint::check_step(const ReceivedPacket& received, bool done) const {
  const PacketHeader& header = received.packet.header;
  const std::string from = name_of(received.peer);
  if (done) return unexpected(from + " sent a message, but no step is under way");
  if (header.step == step_) return {};
  return unexpected(from + " sent its " + direction_name(header.direction) + " of step " +
                    std::to_string(header.step) + ", " + name_of(rank()) + " is at step " +
                    std::to_string(step_) + "; all ranks must take the same number of steps, " +
                    "and after a restart begin with checkpoints of the same step");
}

Status Endpoint::check_frames(const ReceivedPacket& received) const {
  if (received.packet.non_finite || received.shard >= all_shards_.size()) return {};
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
  if (const FirstNonFinite known = known_origin()) return known;
  GW_ASSIGN_OR_RETURN(const FirstNonFinite origin, codec_->find_non_finite(shards));
  return in_marker(origin);
}

Result<FirstNonFinite> Endpoint::encode(std::span<const uint32_t> shards,
                                        std::span<const uint32_t> finite) {
  const Timer timer(stats_.encode_seconds);
  if (const FirstNonFinite known = known_origin()) return known;
  const uint64_t step = shards.empty() ? step_ : encoded(shards[0]).header.step;
  if (std::ranges::find(shards, rank()) != shards.end()) watch_residual(rank());
  GW_ASSIGN_OR_RETURN(const FirstNonFinite origin, codec_->encode(shards, finite, step, writers_));
  if (origin) return in_marker(origin);
  for (uint32_t shard : shards) {
    const Packet packet = encoded(shard);
    const bool pull = owns(shard);
    // Each peer gets the packet of the segments that no rank owns.
    const uint64_t copies = shard == world_size() ? peers_.size() : 1;
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
  return origin;
}

void Endpoint::watch_residual(uint32_t shard) {
  if (stats_.steps % ResidualWatch::kInterval != 0) return;
  watch_.examine(*shards_, codec_->residual_norms({&shard, 1}), step_);
  stats_.outgrown_residuals = watch_.outgrown().size();
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
  for (uint32_t shard : all_shards_) {
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
  outgoing_.push_back({.peer = peer, .bytes = packet});
}

void Endpoint::send_scales(uint32_t peer, Direction direction, std::span<const std::byte> packet) {
  send(peer, direction, packet);
  stats_.scale_bytes_sent += packet.size();
}

void Endpoint::send(uint32_t peer, Direction direction, const SharedBytes& packet) {
  send(peer, direction, std::span(*packet));
  outgoing_.back().keep = packet;
}

void Endpoint::mark_non_finite(uint32_t shard, const NonFiniteOrigin& origin) {
  codec_->fill_nan(shard);
  if (non_finite_) return;
  ++stats_.non_finite_steps;
  non_finite_ = {.rank = origin.rank, .tensor = "?", .element = origin.element};
  // The index came from another rank and may be wrong.
  if (origin.segment >= layout().segments().size()) return;
  const Segment& segment = shards_->segment(origin.segment);
  non_finite_->tensor = layout().tensors()[segment.tensor].name;
  non_finite_->element += segment.tensor_offset;
}

uint32_t Endpoint::outer_rank(uint32_t rank) const {
  return origins_.outer_ranks.empty() ? rank : origins_.outer_ranks[rank];
}

uint32_t Endpoint::leg_rank(const NonFiniteOrigin& origin) const {
  if (origins_.outer_ranks.empty()) return origin.rank;
  return origin.rank < origins_.leg_ranks.size() ? origins_.leg_ranks[origin.rank] : world_size();
}

FirstNonFinite Endpoint::known_origin() const {
  if (!origins_.known || !*origins_.known) return {};
  const NonFiniteInput& known = **origins_.known;
  const std::vector<Segment>& segments = layout().segments();
  NonFiniteOrigin origin = {.rank = known.rank,
                            .segment = static_cast<uint32_t>(segments.size()),
                            .element = known.element};
  for (uint32_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    if (layout().tensors()[segment.tensor].name != known.tensor ||
        known.element - segment.tensor_offset >= segment.n) {
      continue;
    }
    origin.segment = i;
    origin.element = known.element - segment.tensor_offset;
  }
  return origin;
}

FirstNonFinite Endpoint::in_marker(FirstNonFinite origin) const {
  if (origin) origin->rank = outer_rank(origin->rank);
  return origin;
}

Result<bool> Endpoint::pay_residuals() {
  if (!keeps_residuals_) return true;
  GW_ASSIGN_OR_RETURN(FirstNonFinite found, codec_->find_non_finite(all_shards_));
  if (found) return false;  // the step will be skipped
  for (uint32_t i = 0; i < layout().segments().size(); ++i) {
    codec_->pay_residual(i);
    codec_->reset_residual(i, ResidualType::kNone);
  }
  keeps_residuals_ = false;
  return true;
}

std::vector<ResidualPiece> Endpoint::export_residuals() const {
  std::vector<ResidualPiece> pieces;
  for (uint32_t i = 0; i < layout().segments().size(); ++i) {
    const Segment& segment = shards_->segment(i);
    if (codec_->residual_type(i) == ResidualType::kNone) continue;
    pieces.push_back({.direction = shards_->direction(segment.owner),
                      .tensor = layout().tensors()[segment.tensor].name,
                      .offset = segment.tensor_offset,
                      .values = codec_->residual(i)});
  }
  return pieces;
}

Status Endpoint::import_residual(const ResidualPiece& piece) {
  const auto tensor = std::ranges::find(layout().tensors(), piece.tensor, &TensorInfo::name);
  const uint64_t end = piece.offset + piece.values.size();
  if (tensor == layout().tensors().end() || piece.offset > tensor->numel() ||
      end > tensor->numel()) {
    return {StatusCode::kInvalidArgument,
            "residual of tensor '" + piece.tensor + "', values " + std::to_string(piece.offset) +
                ".." + std::to_string(end) + ": the layout has no such place"};
  }
  if (!std::ranges::all_of(piece.values, [](float value) { return std::isfinite(value); })) {
    return {StatusCode::kNonFinite, "residual of tensor '" + piece.tensor + "': not finite"};
  }
  const float ranks = reduction_ == Reduction::kSum ? 1.0f : static_cast<float>(layout().workers());
  for (uint32_t i = 0; i < layout().segments().size(); ++i) {
    const Segment& segment = shards_->segment(i);
    const uint64_t first = std::max(segment.tensor_offset, piece.offset);
    const uint64_t last = std::min(segment.tensor_offset + segment.n, end);
    if (&layout().tensors()[segment.tensor] != &*tensor || first >= last) continue;
    if (world_size() == 1 && codec_->residual_type(i) == ResidualType::kNone) {
      const ResidualType in_pulls = segment.pull_codec->residual_type();
      const ResidualType in_pushes = segment.push_codec->residual_type();
      const ResidualType kept = in_pulls == ResidualType::kNone ? in_pushes : in_pulls;
      codec_->reset_residual(i, kept);
      keeps_residuals_ |= kept != ResidualType::kNone;
    }
    const Direction here = shards_->direction(segment.owner);
    const float factor = here == piece.direction    ? 1.0f
                         : here == Direction::kPull ? 1.0f / ranks
                                                    : ranks;
    codec_->add_to_residual(i, first - segment.tensor_offset,
                            std::span(piece.values).subspan(first - piece.offset, last - first),
                            factor);
  }
  return {};
}

}  // namespace gradwire
