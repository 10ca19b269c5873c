#include <algorithm>
#include <cmath>
#include <utility>

#include "base/checksum.h"
#include "base/return_if_error.h"
#include "exchange/packet_exchange.h"
#include "exchange/timer.h"
#include "stages/element.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

// The ranks, by machine and as seen by one of them.
struct Machines {
  std::vector<uint32_t> speakers;  // the lowest rank of each machine, in order of first ranks
  std::vector<uint32_t> members;   // this rank's machine, without the speaker
  uint32_t mine = 0;               // index of this rank's machine
  uint32_t world_size = 0;

  static Machines create(const std::vector<uint32_t>& machine_of_rank, uint32_t rank) {
    Machines machines;
    std::vector<uint32_t> names;
    for (uint32_t r = 0; r < machine_of_rank.size(); ++r) {
      const auto known = std::find(names.begin(), names.end(), machine_of_rank[r]);
      if (machine_of_rank[r] == machine_of_rank[rank] && r != rank) machines.members.push_back(r);
      if (known != names.end()) continue;
      if (machine_of_rank[r] == machine_of_rank[rank]) {
        machines.mine = static_cast<uint32_t>(names.size());
      }
      names.push_back(machine_of_rank[r]);
      machines.speakers.push_back(r);
    }
    std::erase(machines.members, machines.speakers[machines.mine]);
    machines.world_size = static_cast<uint32_t>(machine_of_rank.size());
    return machines;
  }

  [[nodiscard]] uint32_t speaker() const { return speakers[mine]; }
  [[nodiscard]] bool speaks(uint32_t rank) const { return speaker() == rank; }
};

class HierarchicalExchange final : public Exchange {
 public:
  HierarchicalExchange(std::shared_ptr<const Layout> layout, uint32_t rank, Machines machines,
                       std::string description, ExchangeKind kind, Reduction reduction,
                       std::unique_ptr<Exchange> between, PacketWriter writer, Execution execution)
      : layout_(std::move(layout)),
        rank_(rank),
        machines_(std::move(machines)),
        description_(std::move(description)),
        digest_(digest64({std::as_bytes(std::span(description_))})),
        kind_(kind),
        reduction_(reduction),
        between_(std::move(between)),
        writer_(std::move(writer)),
        execution_(std::move(execution)),
        early_parts_(machines_.members.size()) {}

  std::string describe() const override { return description_; }
  Status start(std::span<float> bucket, uint64_t step) override;
  std::vector<OutgoingMessage> take_outgoing() override;
  std::vector<uint32_t> awaiting() const override;
  Status receive(uint32_t peer, std::span<const std::byte> message) override;
  bool done() const override { return phase_ == Phase::kDone; }
  const std::optional<NonFiniteInput>& non_finite() const override { return non_finite_; }

  bool keeps_residuals() const noexcept override;
  void retract() override {
    if (speaks()) between_->retract();
  }
  void scale_residuals(float factor) override {
    if (speaks()) between_->scale_residuals(factor);
  }
  std::vector<ResidualPiece> export_residuals() const override {
    return speaks() ? between_->export_residuals() : std::vector<ResidualPiece>();
  }
  Status import_residual(const ResidualPiece& piece) override {
    return speaks() ? between_->import_residual(piece) : Status();
  }
  const ExchangeStats& stats() const noexcept override { return stats_; }
  const Layout& layout() const noexcept override { return *layout_; }

 protected:
  uint32_t rank() const override { return rank_; }

 private:
  enum class Phase : uint8_t {
    kDone,
    kParts,    // a speaker waits for its machine
    kBetween,  // the speakers talk
    kResult,   // a member waits for its speaker
  };

  [[nodiscard]] bool speaks() const { return machines_.speaks(rank_); }
  [[nodiscard]] PacketHeader header(PacketRole role) const {
    return {.role = role,
            .source = static_cast<uint16_t>(rank_),
            .step = step_,
            .layout_digest = digest_};
  }
  Result<std::span<const std::byte>> raw_packet(PacketRole role);
  Result<Packet> parse_local(uint32_t peer, std::span<const std::byte> message,
                             PacketRole role) const;
  Status add_parts_in_order();
  Status start_between();
  Status receive_between(uint32_t peer, std::span<const std::byte> message);
  // Takes over what the speakers' exchange has to send; ends the step where that is done.
  Status after_between();
  Status take_result(uint32_t peer, std::span<const std::byte> message);
  // Whether the speakers' exchange skips steps that are not finite.
  [[nodiscard]] bool marks_non_finite() const {
    return keeps_residuals() || (kind_ == ExchangeKind::kTernGrad && machines_.speakers.size() > 1);
  }
  // A member sees only the result: where that is not finite, the step is skipped.
  void note_non_finite_result();
  void count_between();

  std::shared_ptr<const Layout> layout_;
  uint32_t rank_;
  Machines machines_;
  std::string description_;
  uint64_t digest_;
  ExchangeKind kind_;
  Reduction reduction_;
  std::unique_ptr<Exchange> between_;  // null for all but speakers
  PacketWriter writer_;
  Execution execution_;

  Phase phase_ = Phase::kDone;
  std::span<float> bucket_;
  uint64_t step_ = 0;
  size_t next_part_ = 0;                             // index of the member to be added next
  std::vector<std::vector<std::byte>> early_parts_;  // by index; came before a lower rank's
  std::vector<std::pair<uint32_t, std::vector<std::byte>>> early_between_;  // by index of speaker
  std::optional<NonFiniteInput> non_finite_;
  std::vector<OutgoingMessage> outgoing_;
  ExchangeStats stats_;
  double adding_seconds_ = 0;  // parts of this machine
};

Result<std::span<const std::byte>> HierarchicalExchange::raw_packet(PacketRole role) {
  writer_.begin(header(role));
  GW_RETURN_IF_ERROR(writer_.add(bucket_, ResidualView(), DrawContext(), execution_));
  return writer_.finish();
}

Status HierarchicalExchange::start(std::span<float> bucket, uint64_t step) {
  GW_RETURN_IF_ERROR(check_start(*this, bucket.size()));
  bucket_ = bucket;
  step_ = step;
  non_finite_.reset();
  outgoing_.clear();
  next_part_ = 0;
  ++stats_.steps;
  if (speaks()) {
    phase_ = Phase::kParts;
    return machines_.members.empty() ? start_between() : Status();
  }
  phase_ = Phase::kResult;
  Result<std::span<const std::byte>> packet = raw_packet(PacketRole::kPush);
  if (!packet.ok()) return packet.status();
  stats_.local_bytes_sent += packet.value().size();
  outgoing_.push_back({.peer = machines_.speaker(), .bytes = packet.value()});
  return {};
}

std::vector<OutgoingMessage> HierarchicalExchange::take_outgoing() {
  return std::exchange(outgoing_, {});
}

std::vector<uint32_t> HierarchicalExchange::awaiting() const {
  switch (phase_) {
    case Phase::kDone:
      return {};
    case Phase::kResult:
      return {machines_.speaker()};
    case Phase::kParts: {
      std::vector<uint32_t> peers;
      for (size_t i = next_part_; i < machines_.members.size(); ++i) {
        if (early_parts_[i].empty()) peers.push_back(machines_.members[i]);
      }
      return peers;
    }
    case Phase::kBetween: {
      std::vector<uint32_t> peers = between_->awaiting();
      for (uint32_t& peer : peers) peer = machines_.speakers[peer];
      return peers;
    }
  }
  return {};
}

Result<Packet> HierarchicalExchange::parse_local(uint32_t peer, std::span<const std::byte> message,
                                                 PacketRole role) const {
  const std::string from = "rank " + std::to_string(peer);
  Result<Packet> packet = parse_packet(message);
  if (!packet.ok()) {
    return Status(packet.status().code(),
                  "message from " + from + ": " + packet.status().message());
  }
  const PacketHeader& header = packet.value().header;
  if (header.layout_digest != digest_) {
    return Status(
        StatusCode::kPeerMismatch,
        from + " works with another exchange, layout or codec than rank " + std::to_string(rank_));
  }
  if (header.source != peer || header.role != role || header.step != step_) {
    return unexpected(from + " sent a message of rank " + std::to_string(header.source) +
                      ", step " + std::to_string(header.step) + "; rank " + std::to_string(rank_) +
                      " is at step " + std::to_string(step_));
  }
  const std::vector<PacketFrame>& frames = packet.value().frames;
  const bool whole = frames.size() == 1 && frames[0].n == bucket_.size() &&
                     frames[0].payload.size() == bucket_.size_bytes();
  if (!whole && !packet.value().non_finite) {
    return Status(StatusCode::kPeerMismatch,
                  "the frames of " + from + "'s packet are not those of the layout");
  }
  return packet;
}

Status HierarchicalExchange::receive(uint32_t peer, std::span<const std::byte> message) {
  if (done()) {
    return unexpected("rank " + std::to_string(peer) + " sent a message, but no step is under way");
  }
  if (!speaks()) return take_result(peer, message);
  const auto member = std::find(machines_.members.begin(), machines_.members.end(), peer);
  if (member == machines_.members.end()) return receive_between(peer, message);
  const auto index = static_cast<size_t>(member - machines_.members.begin());
  if (index < next_part_ || !early_parts_[index].empty()) {
    return unexpected("rank " + std::to_string(peer) + " sent its part of step " +
                      std::to_string(step_) + " twice");
  }
  Result<Packet> packet = parse_local(peer, message, PacketRole::kPush);
  if (!packet.ok()) return packet.status();
  early_parts_[index].assign(message.begin(), message.end());
  return add_parts_in_order();
}

Status HierarchicalExchange::add_parts_in_order() {
  {
    const Timer timer(adding_seconds_);
    for (; next_part_ < machines_.members.size() && !early_parts_[next_part_].empty();
         ++next_part_) {
      const Packet packet = parse_packet(early_parts_[next_part_]).value();
      Result<std::shared_ptr<const Codec>> raw = Codec::from_wire(packet.frames[0].codec);
      if (!raw.ok()) return raw.status();
      GW_RETURN_IF_ERROR(
          raw.value()->decode(packet.frames[0].payload, bucket_, DecodeMode::kAdd, execution_));
      early_parts_[next_part_].clear();
    }
  }
  return next_part_ == machines_.members.size() ? start_between() : Status();
}

Status HierarchicalExchange::start_between() {
  // The speakers average over the machines, whatever the machines' sizes.
  if (reduction_ == Reduction::kAverage) {
    const auto machines = static_cast<float>(machines_.speakers.size());
    execution_.kernels().divide(bucket_.data(), bucket_.size(),
                                static_cast<float>(machines_.world_size) / machines);
  }
  phase_ = Phase::kBetween;
  GW_RETURN_IF_ERROR(between_->start(bucket_, step_));
  GW_RETURN_IF_ERROR(after_between());
  for (const auto& [speaker, message] : std::exchange(early_between_, {})) {
    GW_RETURN_IF_ERROR(between_->receive(speaker, message));
    GW_RETURN_IF_ERROR(after_between());
  }
  return {};
}

Status HierarchicalExchange::receive_between(uint32_t peer, std::span<const std::byte> message) {
  const auto found = std::find(machines_.speakers.begin(), machines_.speakers.end(), peer);
  if (found == machines_.speakers.end()) {
    return unexpected("rank " + std::to_string(peer) + " speaks for no machine, but sent rank " +
                      std::to_string(rank_) + " a message");
  }
  const auto speaker = static_cast<uint32_t>(found - machines_.speakers.begin());
  if (phase_ == Phase::kParts) {
    early_between_.emplace_back(speaker, std::vector(message.begin(), message.end()));
    return {};
  }
  GW_RETURN_IF_ERROR(between_->receive(speaker, message));
  return after_between();
}

Status HierarchicalExchange::after_between() {
  for (OutgoingMessage message : between_->take_outgoing()) {
    message.peer = machines_.speakers[message.peer];
    outgoing_.push_back(message);
  }
  if (!between_->done() || done()) return {};
  non_finite_ = between_->non_finite();
  if (non_finite_) non_finite_->rank = machines_.speakers[non_finite_->rank];
  phase_ = Phase::kDone;
  if (!machines_.members.empty()) {
    Result<std::span<const std::byte>> packet = raw_packet(PacketRole::kPull);
    if (!packet.ok()) return packet.status();
    for (uint32_t member : machines_.members) {
      outgoing_.push_back({.peer = member, .bytes = packet.value()});
      stats_.local_bytes_sent += packet.value().size();
    }
  }
  count_between();
  return {};
}

Status HierarchicalExchange::take_result(uint32_t peer, std::span<const std::byte> message) {
  if (peer != machines_.speaker()) {
    return unexpected("rank " + std::to_string(peer) + " sent rank " + std::to_string(rank_) +
                      " a message, which talks to rank " + std::to_string(machines_.speaker()) +
                      " alone");
  }
  Result<Packet> packet = parse_local(peer, message, PacketRole::kPull);
  if (!packet.ok()) return packet.status();
  std::ranges::copy(packet.value().frames[0].payload, std::as_writable_bytes(bucket_).begin());
  phase_ = Phase::kDone;
  if (marks_non_finite()) note_non_finite_result();
  return {};
}

bool HierarchicalExchange::keeps_residuals() const noexcept {
  if (machines_.speakers.size() == 1) return false;
  return std::ranges::any_of(layout_->segments(), [](const Segment& segment) {
    return segment.push_codec->residual_type() != ResidualType::kNone ||
           segment.pull_codec->residual_type() != ResidualType::kNone;
  });
}

void HierarchicalExchange::note_non_finite_result() {
  if (execution_.kernels().absmax(bucket_.data(), bucket_.size()) < kNonFiniteBits) return;
  for (const Segment& segment : layout_->segments()) {
    const std::span<const float> x = bucket_.subspan(segment.bucket_offset, segment.n);
    const auto bad = std::find_if(x.begin(), x.end(), [](float v) { return !std::isfinite(v); });
    if (bad == x.end()) continue;
    ++stats_.non_finite_steps;
    non_finite_ = {.rank = machines_.speaker(),
                   .tensor = layout_->tensors()[segment.tensor].name,
                   .element = segment.tensor_offset + static_cast<uint64_t>(bad - x.begin())};
    return;
  }
}

void HierarchicalExchange::count_between() {
  const uint64_t local_bytes = stats_.local_bytes_sent;
  stats_ = between_->stats();
  stats_.local_bytes_sent = local_bytes;
  stats_.decode_seconds += adding_seconds_;
}

Status check_machines(const Layout& layout, const std::vector<uint32_t>& machine_of_rank,
                      uint32_t rank) {
  if (rank >= machine_of_rank.size()) {
    return {StatusCode::kInvalidArgument, "rank " + std::to_string(rank) +
                                              " is not below the number of ranks " +
                                              std::to_string(machine_of_rank.size())};
  }
  const Machines machines = Machines::create(machine_of_rank, rank);
  if (machines.speakers.size() == layout.world_size()) return {};
  return {StatusCode::kInvalidArgument, "the layout is for " + std::to_string(layout.world_size()) +
                                            " machines, there are " +
                                            std::to_string(machines.speakers.size())};
}

}  // namespace

Result<std::unique_ptr<Exchange>> make_hierarchical_exchange(
    std::shared_ptr<const Layout> layout, uint32_t rank,
    const std::vector<uint32_t>& machine_of_rank, ExchangeKind between, Execution execution,
    Execution execution_between, uint64_t seed, Reduction reduction) {
  GW_RETURN_IF_ERROR(check_machines(*layout, machine_of_rank, rank));
  Machines machines = Machines::create(machine_of_rank, rank);
  std::unique_ptr<Exchange> speakers;
  if (machines.speaks(rank)) {
    Result<std::unique_ptr<Exchange>> made = make_exchange(
        between, layout, machines.mine, std::move(execution_between), seed, reduction);
    if (!made.ok()) return made.status();
    speakers = std::move(made).value();
  }
  std::string description = "exchange hierarchical, " + std::string(exchange_name(between)) +
                            " between machines" + (reduction == Reduction::kSum ? ", sum\n" : "\n");
  for (uint32_t r = 0; r < machine_of_rank.size(); ++r) {
    description +=
        "rank " + std::to_string(r) + " on machine " + std::to_string(machine_of_rank[r]) + "\n";
  }
  description += layout->describe();
  Result<std::shared_ptr<const Codec>> raw = Codec::parse("raw");
  if (!raw.ok()) return raw.status();
  Result<PacketWriter> writer = PacketWriter::create({{raw.value(), layout->numel()}});
  if (!writer.ok()) return writer.status();
  return std::unique_ptr<Exchange>(std::make_unique<HierarchicalExchange>(
      std::move(layout), rank, std::move(machines), std::move(description), between, reduction,
      std::move(speakers), std::move(writer).value(), std::move(execution)));
}

}  // namespace gradwire
