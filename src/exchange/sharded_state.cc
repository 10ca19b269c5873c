#include "exchange/sharded_state.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "base/checksum.h"
#include "base/return_if_error.h"
#include "stages/element.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

// A step in so many is measured for the error norm; each costs a pass over the bucket.
constexpr uint64_t kErrorNormInterval = 64;
// Values a step of the finite check that threads take one by one.
constexpr uint64_t kScanPiece = 65536;

// Adds the time until its end to `seconds`.
class Timer {
 public:
  explicit Timer(double& seconds) : seconds_(seconds) {}
  ~Timer() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

const char* role_name(PacketRole role) { return role == PacketRole::kPush ? "push" : "pull"; }

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

ShardedExchange::State::State(std::shared_ptr<const Layout> layout_in, uint32_t rank_in,
                              Execution execution_in, uint64_t seed_in)
    : layout(std::move(layout_in)),
      rank(rank_in),
      execution(std::move(execution_in)),
      seed(seed_in),
      owned(layout->world_size()),
      push_arrivals(layout->world_size()),
      pull_arrivals(layout->world_size()),
      voided(layout->world_size()),
      early_pushes(layout->world_size()) {}

Status ShardedExchange::State::make_writers() {
  const std::vector<Segment>& segments = layout->segments();
  for (uint32_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    owned[segment.owner].push_back(i);
    const Codec& codec = owns(segment) ? *segment.pull_codec : *segment.push_codec;
    // A lone rank sends nothing, so it loses nothing.
    const ResidualType type = world_size() == 1 ? ResidualType::kNone : codec.residual_type();
    residuals.emplace_back(type, segment.n);
    // By name, so that no other tensor has the same, whichever bucket it lies in.
    const uint64_t place[] = {rank, segment.tensor_offset};
    streams.push_back(digest64({std::as_bytes(std::span(place)),
                                std::as_bytes(std::span(layout->tensors()[segment.tensor].name))}));
    // The same verdict on every rank: whoever sees NaN must say so if anybody keeps a residual.
    keeps_residuals |=
        world_size() > 1 && (segment.push_codec->residual_type() != ResidualType::kNone ||
                             segment.pull_codec->residual_type() != ResidualType::kNone);
  }
  for (uint32_t owner = 0; owner < world_size(); ++owner) {
    std::vector<PacketWriter::Segment> shapes;
    for (uint32_t i : owned[owner]) {
      shapes.push_back(
          {owner == rank ? segments[i].pull_codec : segments[i].push_codec, segments[i].n});
    }
    Result<PacketWriter> writer = PacketWriter::create(std::move(shapes));
    if (!writer.ok()) return writer.status();
    writers.push_back(std::move(writer).value());
  }
  return {};
}

std::span<float> ShardedExchange::State::shard(uint32_t owner) const {
  if (owned[owner].empty()) return {};
  const Segment& first = layout->segments()[owned[owner].front()];
  const Segment& last = layout->segments()[owned[owner].back()];
  return bucket.subspan(first.bucket_offset, last.bucket_offset + last.n - first.bucket_offset);
}

DrawContext ShardedExchange::State::draw(uint32_t segment) const {
  return {.seed = seed, .stream = streams[segment], .step = step};
}

PacketHeader ShardedExchange::State::header(PacketRole role) const {
  return {
      .role = role, .source = static_cast<uint16_t>(rank), .step = step, .layout_digest = digest};
}

void ShardedExchange::State::begin_step(std::span<float> new_bucket, uint64_t new_step) {
  bucket = new_bucket;
  step = new_step;
  ++stats.steps;
  pushes_missing = pulls_missing = world_size() - 1;
  std::fill(push_arrivals.begin(), push_arrivals.end(), Arrival::kMissing);
  std::fill(pull_arrivals.begin(), pull_arrivals.end(), Arrival::kMissing);
  std::fill(voided.begin(), voided.end(), false);
  next_push = rank == 0 ? 1 : 0;
  poison.reset();
  non_finite.reset();
  outgoing.clear();
  for (uint32_t owner = 0; owner < world_size(); ++owner) {
    writers[owner].begin(header(owner == rank ? PacketRole::kPull : PacketRole::kPush));
  }
}

std::optional<NonFiniteOrigin> ShardedExchange::State::find_non_finite(
    std::span<const uint32_t> segments) {
  for (uint32_t i : segments) {
    const std::span<const float> x = values(layout->segments()[i]);
    const uint64_t pieces = (x.size() + kScanPiece - 1) / kScanPiece;
    std::vector<uint32_t> largest(pieces);
    execution.for_each(pieces, [&](size_t piece) {
      const std::span<const float> part = x.subspan(
          piece * kScanPiece, std::min<uint64_t>(kScanPiece, x.size() - piece * kScanPiece));
      largest[piece] = execution.kernels().absmax(part.data(), part.size());
    });
    if (std::none_of(largest.begin(), largest.end(),
                     [](uint32_t bits) { return bits >= kNonFiniteBits; })) {
      continue;
    }
    const auto bad = std::find_if(x.begin(), x.end(), [](float v) { return !std::isfinite(v); });
    return NonFiniteOrigin{
        .rank = rank, .segment = i, .element = static_cast<uint64_t>(bad - x.begin())};
  }
  return std::nullopt;
}

Result<std::optional<NonFiniteOrigin>> ShardedExchange::State::encode(uint32_t owner,
                                                                      PacketRole role) {
  for (uint32_t i : owned[owner]) {
    const Segment& segment = layout->segments()[i];
    const Status status =
        writers[owner].add(values(segment), residuals[i].view(), draw(i), execution);
    if (status.code() == StatusCode::kNonFinite) {
      put_back(owner);
      return std::optional(NonFiniteOrigin{.rank = rank, .segment = i, .element = 0});
    }
    GW_RETURN_IF_ERROR(status);
    auto& values_sent = role == PacketRole::kPush ? stats.values_pushed : stats.values_pulled;
    values_sent += segment.n;
  }
  return std::optional<NonFiniteOrigin>();
}

void ShardedExchange::State::pay_residuals() {
  if (find_non_finite(owned[rank])) return;  // the step will be skipped
  for (uint32_t i : owned[rank]) {
    const std::vector<float> owed = residuals[i].values();
    execution.kernels().add_f32(owed.data(), owed.size(), values(layout->segments()[i]).data());
    residuals[i] = Residual();
  }
  keeps_residuals = false;
}

Status ShardedExchange::State::encode_pushes() {
  const Timer timer(stats.encode_seconds);
  // Looked at first, as a whole: a step that will be skipped must not touch any residual here.
  if (keeps_residuals) {
    for (uint32_t owner = 0; owner < world_size() && !poison; ++owner) {
      poison = find_non_finite(owned[owner]);
    }
  }
  for (uint32_t owner = 0; owner < world_size() && !poison; ++owner) {
    if (owner == rank) continue;
    Result<std::optional<NonFiniteOrigin>> origin = encode(owner, PacketRole::kPush);
    if (!origin.ok()) return origin.status();
    poison = origin.value();
    if (!poison) continue;
    for (uint32_t earlier = 0; earlier < owner; ++earlier) {
      if (earlier != rank) put_back(earlier);
    }
  }
  for (uint32_t peer = 0; peer < world_size(); ++peer) {
    if (peer == rank) continue;
    const std::span<const std::byte> packet =
        poison ? writers[peer].finish_non_finite(*poison) : writers[peer].finish();
    stats.push_bytes_sent += packet.size();
    outgoing.push_back({.peer = peer, .bytes = packet});
  }
  if (!poison && stats.steps % kErrorNormInterval == 1) sample_error_norm();
  return {};
}

void ShardedExchange::State::sample_error_norm() {
  double error = 0;
  double input = 0;
  std::vector<float> decoded;
  for (uint32_t owner = 0; owner < world_size(); ++owner) {
    if (owner == rank) continue;
    for (size_t k = 0; k < owned[owner].size(); ++k) {
      const uint32_t i = owned[owner][k];
      const Segment& segment = layout->segments()[i];
      const std::span<const float> x = values(segment);
      input += squared_distance(x, std::vector<float>(x.size()));
      if (residuals[i].type() != ResidualType::kNone) {
        error += residuals[i].squared_norm();
        continue;
      }
      decoded.resize(segment.n);
      if (segment.push_codec
              ->decode(writers[owner].payload(k), decoded, DecodeMode::kStore, execution)
              .ok()) {
        error += squared_distance(x, decoded);
      }
    }
  }
  if (!(input > 0)) return;
  stats.error_norm_sum += std::sqrt(error / input);
  ++stats.error_norm_samples;
}

Status ShardedExchange::State::check_header(uint32_t peer, const PacketHeader& header) const {
  const std::string from = "rank " + std::to_string(peer);
  if (peer >= world_size() || peer == rank) return unexpected(from + " is no peer");
  if (done()) return unexpected(from + " sent a message, but no step is under way");
  if (header.source != peer) {
    return unexpected(from + " handed over a message of rank " + std::to_string(header.source));
  }
  if (header.layout_digest != digest) {
    return {StatusCode::kPeerMismatch,
            from + " works with another layout or codec than rank " + std::to_string(rank)};
  }
  if (header.step != step) {
    return unexpected(from + " sent its " + role_name(header.role) + " of step " +
                      std::to_string(header.step) + ", rank " + std::to_string(rank) +
                      " is at step " + std::to_string(step));
  }
  return {};
}

Status ShardedExchange::State::check_frames(uint32_t peer, const Packet& packet,
                                            uint32_t owner) const {
  const std::vector<uint32_t>& expected = owned[owner];
  const bool push = packet.header.role == PacketRole::kPush;
  bool same = packet.frames.size() == expected.size();
  for (size_t k = 0; same && k < expected.size(); ++k) {
    const Segment& segment = layout->segments()[expected[k]];
    const Codec& codec = push ? *segment.push_codec : *segment.pull_codec;
    same = packet.frames[k].n == segment.n && packet.frames[k].codec == codec.wire();
  }
  if (same) return {};
  return {StatusCode::kPeerMismatch,
          "the frames of rank " + std::to_string(peer) + "'s packet are not those of the layout"};
}

Status ShardedExchange::State::take_push(uint32_t peer, const Packet& packet,
                                         std::span<const std::byte> message) {
  --pushes_missing;
  if (packet.non_finite) {
    if (!poison) poison = packet.non_finite;
  } else if (peer == next_push) {
    GW_RETURN_IF_ERROR(add_push(packet));
  } else {
    early_pushes[peer].assign(message.begin(), message.end());
  }
  GW_RETURN_IF_ERROR(add_pushes_in_order());
  return pushes_missing == 0 ? encode_pull() : Status();
}

Status ShardedExchange::State::add_push(const Packet& packet) {
  const Timer timer(stats.decode_seconds);
  for (size_t k = 0; k < packet.frames.size(); ++k) {
    const Segment& segment = layout->segments()[owned[rank][k]];
    GW_RETURN_IF_ERROR(segment.push_codec->decode(packet.frames[k].payload, values(segment),
                                                  DecodeMode::kAdd, execution));
  }
  return {};
}

// Moves next_push over all ranks whose pushes are here, adding those that had come early.
Status ShardedExchange::State::add_pushes_in_order() {
  while (next_push < world_size() &&
         (next_push == rank || push_arrivals[next_push] == Arrival::kHere)) {
    std::vector<std::byte>& early = early_pushes[next_push];
    if (!early.empty()) {
      GW_RETURN_IF_ERROR(add_push(parse_packet(early).value()));
      early.clear();
    }
    ++next_push;
  }
  return {};
}

Status ShardedExchange::State::encode_pull() {
  PacketWriter& writer = writers[rank];
  {
    const Timer timer(stats.encode_seconds);
    const std::span<float> mine = shard(rank);
    execution.kernels().divide(mine.data(), mine.size(), static_cast<float>(world_size()));
    if (!poison && keeps_residuals) poison = find_non_finite(owned[rank]);
    if (!poison) {
      Result<std::optional<NonFiniteOrigin>> origin = encode(rank, PacketRole::kPull);
      if (!origin.ok()) return origin.status();
      poison = origin.value();
    }
    const std::span<const std::byte> packet =
        poison ? writer.finish_non_finite(*poison) : writer.finish();
    for (uint32_t peer = 0; peer < world_size(); ++peer) {
      if (peer != rank) outgoing.push_back({.peer = peer, .bytes = packet});
    }
    stats.pull_bytes_encoded += packet.size();
    stats.pull_bytes_sent += packet.size() * (world_size() - 1);
  }
  const Timer timer(stats.decode_seconds);
  if (poison) {
    note_non_finite(*poison);
    std::ranges::fill(shard(rank), std::numeric_limits<float>::quiet_NaN());
    return {};
  }
  for (size_t k = 0; k < owned[rank].size(); ++k) {
    const Segment& segment = layout->segments()[owned[rank][k]];
    GW_RETURN_IF_ERROR(segment.pull_codec->decode(writer.payload(k), values(segment),
                                                  DecodeMode::kStore, execution));
  }
  return {};
}

Status ShardedExchange::State::take_pull(uint32_t peer, const Packet& packet) {
  const Timer timer(stats.decode_seconds);
  --pulls_missing;
  if (packet.non_finite) {
    note_non_finite(*packet.non_finite);
    voided[peer] = true;
    std::ranges::fill(shard(peer), std::numeric_limits<float>::quiet_NaN());
    return {};
  }
  return store_pull(packet, peer);
}

Status ShardedExchange::State::store_pull(const Packet& packet, uint32_t owner) {
  for (size_t k = 0; k < packet.frames.size(); ++k) {
    const Segment& segment = layout->segments()[owned[owner][k]];
    GW_RETURN_IF_ERROR(segment.pull_codec->decode(packet.frames[k].payload, values(segment),
                                                  DecodeMode::kStore, execution));
  }
  return {};
}

void ShardedExchange::State::note_non_finite(const NonFiniteOrigin& origin) {
  if (non_finite) return;
  ++stats.non_finite_steps;
  // The indices came over the wire.
  if (origin.segment >= layout->segments().size()) {
    non_finite = NonFiniteInput{.rank = origin.rank, .tensor = "?", .element = origin.element};
    return;
  }
  const Segment& segment = layout->segments()[origin.segment];
  non_finite = NonFiniteInput{.rank = origin.rank,
                              .tensor = layout->tensors()[segment.tensor].name,
                              .element = segment.tensor_offset + origin.element};
}

void ShardedExchange::State::put_back(uint32_t owner) {
  std::vector<float> sent;
  for (size_t k = 0; k < writers[owner].added(); ++k) {
    const uint32_t i = owned[owner][k];
    if (residuals[i].type() == ResidualType::kNone) continue;
    const Segment& segment = layout->segments()[i];
    const Codec& codec = owner == rank ? *segment.pull_codec : *segment.push_codec;
    sent.resize(segment.n);
    if (codec.decode(writers[owner].payload(k), sent, DecodeMode::kStore, execution).ok()) {
      residuals[i].add(0, sent, 1.0f);
    }
  }
  writers[owner].begin(header(owner == rank ? PacketRole::kPull : PacketRole::kPush));
}

void ShardedExchange::State::retract() {
  // What an owner took up of a push is in its average, and comes back with the pull it took back.
  for (uint32_t owner = 0; owner < world_size(); ++owner) {
    if (owner == rank || voided[owner]) put_back(owner);
  }
}

}  // namespace gradwire
