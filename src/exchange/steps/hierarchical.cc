#include <algorithm>
#include <optional>
#include <utility>

#include "base/checksum.h"
#include "base/return_if_error.h"
#include "exchange/steps/exchange_entry.h"
#include "exchange/steps/packet_exchange.h"
#include "exchange/steps/timer.h"

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
};

// A bucket that goes as it is, in one packet, between the ranks of a machine.
struct RawBucket {
  std::shared_ptr<const Shards> shards;  // one
  std::unique_ptr<ShardCodec> codec;
  PacketWriter writer;

  static Result<RawBucket> create(uint64_t numel, const ShardCodecFactory& codecs) {
    Result<Layout> layout = Layout::create({{"", {numel}}}, 1, {.codec = "raw"});
    if (!layout.ok()) return layout.status();
    auto shards = std::make_shared<const Shards>(
        std::make_shared<const Layout>(std::move(layout).value()), 0, 0);
    std::vector<PacketWriter::Segment> shapes;
    for (uint32_t i : shards->segments[0]) {
      shapes.push_back({shards->own_codec(i), shards->segment(i).n});
    }
    Result<PacketWriter> writer = PacketWriter::create(std::move(shapes));
    if (!writer.ok()) return writer.status();
    Result<std::unique_ptr<ShardCodec>> codec = codecs(shards);
    if (!codec.ok()) return codec.status();
    return RawBucket{std::move(shards), std::move(codec).value(), std::move(writer).value()};
  }

  Result<std::span<const std::byte>> packet(const PacketHeader& header) {
    writer.begin(header);
    Result<FirstNonFinite> encoded = codec->encode(kWhole, {}, header.step, std::span(&writer, 1));
    if (!encoded.ok()) return encoded.status();
    return writer.finish();
  }
  Status decode(const Packet& packet, DecodeMode mode) {
    const Packet* const packets[] = {&packet};
    return codec->decode(0, packets, mode, {});
  }
  [[nodiscard]] bool holds(const Packet& packet) const {
    const auto same = [&](const PacketFrame& frame, uint32_t i) {
      return frame.n == shards->segment(i).n && frame.codec == shards->own_codec(i)->wire();
    };
    return !packet.non_finite && std::ranges::equal(packet.frames, shards->segments[0], same);
  }

  static constexpr uint32_t kWhole[] = {0};
};

class HierarchicalExchange final : public Exchange {
 public:
  HierarchicalExchange(std::shared_ptr<const Layout> layout, uint32_t rank, Machines machines,
                       std::string description, const ExchangeInfo& inner, Reduction reduction,
                       std::unique_ptr<Exchange> between, RawBucket raw)
      : layout_(std::move(layout)),
        rank_(rank),
        machines_(std::move(machines)),
        description_(std::move(description)),
        digest_(digest64({std::as_bytes(std::span(description_))})),
        inner_(inner),
        reduction_(reduction),
        between_(std::move(between)),
        raw_(std::move(raw)),
        early_parts_(machines_.members.size()) {}

  std::string describe() const override { return description_; }
  Status start(std::span<float> bucket, uint64_t step) override;
  std::vector<OutgoingMessage> take_outgoing() override { return std::exchange(outgoing_, {}); }
  std::vector<uint32_t> awaiting() const override;
  Status receive(uint32_t peer, std::span<const std::byte> message) override;
  bool done() const override { return phase_ == Phase::kDone; }
  const std::optional<NonFiniteInput>& non_finite() const override { return non_finite_; }

  bool keeps_residuals() const noexcept override { return any_residuals(*layout_); }
  void retract() override {
    if (between_) between_->retract();
  }
  void scale_residuals(float factor) override {
    if (between_) between_->scale_residuals(factor);
  }
  std::vector<ResidualPiece> export_residuals() const override {
    return between_ ? between_->export_residuals() : std::vector<ResidualPiece>();
  }
  Status import_residual(const ResidualPiece& piece) override {
    return between_ ? between_->import_residual(piece) : Status();
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

  // Sends the bucket as it is to these ranks.
  Status send_raw(Direction direction, std::span<const uint32_t> ranks);
  // The packet of a message that must come from the rank's own machine now.
  Result<ReceivedPacket> open_raw(uint32_t peer, std::span<const std::byte> message,
                                  Direction direction) const;
  Status receive_part(size_t member, std::span<const std::byte> message);
  Status receive_result(uint32_t peer, std::span<const std::byte> message);
  Status receive_between(uint32_t peer, std::span<const std::byte> message);
  Status start_between();
  // Takes over what the speakers' exchange has to send; ends the step where that is done.
  Status after_between();
  // Whether the speakers' exchange skips steps that are not finite.
  [[nodiscard]] bool marks_non_finite() const {
    return keeps_residuals() || (inner_.always_skips_non_finite && machines_.speakers.size() > 1);
  }
  // A member sees only the result: where that is not finite, the step is skipped.
  Status note_non_finite_result();

  std::shared_ptr<const Layout> layout_;
  uint32_t rank_;
  Machines machines_;
  std::string description_;
  uint64_t digest_;
  const ExchangeInfo& inner_;  // what the speakers do
  Reduction reduction_;
  std::unique_ptr<Exchange> between_;  // null for all but speakers
  RawBucket raw_;

  Phase phase_ = Phase::kDone;
  std::span<float> bucket_;
  uint64_t step_ = 0;
  size_t next_part_ = 0;                                    // index of the member to be added next
  std::vector<std::optional<ReceivedPacket>> early_parts_;  // by index; came before a lower rank's
  std::vector<std::pair<uint32_t, std::vector<std::byte>>> early_between_;  // by index of speaker
  std::optional<NonFiniteInput> non_finite_;
  std::vector<OutgoingMessage> outgoing_;
  ExchangeStats stats_;
  double adding_seconds_ = 0;  // parts of this machine
};

Status HierarchicalExchange::send_raw(Direction direction, std::span<const uint32_t> ranks) {
  if (ranks.empty()) return {};
  Result<std::span<const std::byte>> packet = raw_.packet({.direction = direction,
                                                           .source = static_cast<uint16_t>(rank_),
                                                           .step = step_,
                                                           .layout_digest = digest_});
  if (!packet.ok()) return packet.status();
  for (uint32_t rank : ranks) {
    outgoing_.push_back({.peer = rank, .bytes = packet.value()});
    stats_.local_bytes_sent += packet.value().size();
  }
  return {};
}

Status HierarchicalExchange::start(std::span<float> bucket, uint64_t step) {
  GW_RETURN_IF_ERROR(check_start(*this, bucket.size()));
  bucket_ = bucket;
  step_ = step;
  raw_.codec->begin(bucket);
  non_finite_.reset();
  outgoing_.clear();
  next_part_ = 0;
  ++stats_.steps;
  if (!between_) {
    phase_ = Phase::kResult;
    const uint32_t speaker[] = {machines_.speaker()};
    return send_raw(Direction::kPush, speaker);
  }
  phase_ = Phase::kParts;
  return machines_.members.empty() ? start_between() : Status();
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
        if (!early_parts_[i]) peers.push_back(machines_.members[i]);
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

Result<ReceivedPacket> HierarchicalExchange::open_raw(uint32_t peer,
                                                      std::span<const std::byte> message,
                                                      Direction direction) const {
  const std::string from = name_of(peer);
  Result<Packet> packet = parse_packet(message);
  if (!packet.ok()) {
    return Status(packet.status().code(),
                  "message from " + from + ": " + packet.status().message());
  }
  const PacketHeader& header = packet.value().header;
  if (header.layout_digest != digest_) {
    return Status(StatusCode::kPeerMismatch, from + " works with another exchange, layout or " +
                                                 "codec than " + name_of(rank_));
  }
  if (header.source != peer || header.direction != direction || header.step != step_) {
    return unexpected(from + " sent a message of " + name_of(header.source) + ", step " +
                      std::to_string(header.step) + "; " + name_of(rank_) + " is at step " +
                      std::to_string(step_));
  }
  if (!raw_.holds(packet.value())) {
    return Status(StatusCode::kPeerMismatch,
                  "the frames of " + from + "'s packet are not those of the layout");
  }
  return ReceivedPacket{
      .peer = peer, .shard = 0, .packet = std::move(packet).value(), .message = message};
}

Status HierarchicalExchange::receive(uint32_t peer, std::span<const std::byte> message) {
  if (done()) return unexpected(name_of(peer) + " sent a message, but no step is under way");
  if (!between_) return receive_result(peer, message);
  const auto member = std::ranges::find(machines_.members, peer);
  if (member == machines_.members.end()) return receive_between(peer, message);
  return receive_part(static_cast<size_t>(member - machines_.members.begin()), message);
}

Status HierarchicalExchange::receive_part(size_t member, std::span<const std::byte> message) {
  const uint32_t peer = machines_.members[member];
  if (member < next_part_ || early_parts_[member]) {
    return unexpected(name_of(peer) + " sent its part of step " + std::to_string(step_) + " twice");
  }
  Result<ReceivedPacket> received = open_raw(peer, message, Direction::kPush);
  if (!received.ok()) return received.status();
  early_parts_[member] = std::move(received).value();
  if (member != next_part_) {
    early_parts_[member]->keep();
    return {};
  }
  {
    const Timer timer(adding_seconds_);
    for (; next_part_ < early_parts_.size() && early_parts_[next_part_]; ++next_part_) {
      GW_RETURN_IF_ERROR(raw_.decode(early_parts_[next_part_]->packet, DecodeMode::kAdd));
      early_parts_[next_part_].reset();
    }
  }
  return next_part_ == early_parts_.size() ? start_between() : Status();
}

Status HierarchicalExchange::start_between() {
  // The speakers average over the machines, whatever the machines' sizes.
  if (reduction_ == Reduction::kAverage) {
    const auto machines = static_cast<float>(machines_.speakers.size());
    raw_.codec->divide(0, static_cast<float>(machines_.world_size) / machines);
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
  const auto found = std::ranges::find(machines_.speakers, peer);
  if (found == machines_.speakers.end()) {
    return unexpected(name_of(peer) + " speaks for no machine, but sent " + name_of(rank_) +
                      " a message");
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
  GW_RETURN_IF_ERROR(send_raw(Direction::kPull, machines_.members));
  const uint64_t local_bytes = stats_.local_bytes_sent;
  stats_ = between_->stats();
  stats_.local_bytes_sent = local_bytes;
  stats_.decode_seconds += adding_seconds_;
  return {};
}

Status HierarchicalExchange::receive_result(uint32_t peer, std::span<const std::byte> message) {
  if (peer != machines_.speaker()) {
    return unexpected(name_of(peer) + " sent " + name_of(rank_) + " a message, which talks to " +
                      name_of(machines_.speaker()) + " alone");
  }
  Result<ReceivedPacket> received = open_raw(peer, message, Direction::kPull);
  if (!received.ok()) return received.status();
  GW_RETURN_IF_ERROR(raw_.decode(received.value().packet, DecodeMode::kStore));
  phase_ = Phase::kDone;
  return marks_non_finite() ? note_non_finite_result() : Status();
}

Status HierarchicalExchange::note_non_finite_result() {
  Result<FirstNonFinite> found = raw_.codec->find_non_finite(RawBucket::kWhole);
  if (!found.ok()) return found.status();
  if (!found.value()) return {};
  const uint64_t element = found.value()->element;  // of the bucket
  const auto segment = std::ranges::find_if(layout_->segments(), [&](const Segment& candidate) {
    return element - candidate.bucket_offset < candidate.n;
  });
  ++stats_.non_finite_steps;
  non_finite_ = {.rank = machines_.speaker(),
                 .tensor = layout_->tensors()[segment->tensor].name,
                 .element = segment->tensor_offset + element - segment->bucket_offset};
  return {};
}

// By rank. kInvalidArgument: not one machine for each rank of the layout, or no such rank.
Result<std::vector<uint32_t>> machines_of(const ExchangeChoice& choice,
                                          const ExchangeSetup& setup) {
  std::vector<uint32_t> machine_of_rank = setup.options.machine_of_rank;
  const uint32_t size = choice.ranks_per_machine();
  if (machine_of_rank.empty() && size > 0) {
    for (uint64_t rank = 0; rank < uint64_t{setup.layout->world_size()} * size; ++rank) {
      machine_of_rank.push_back(static_cast<uint32_t>(rank / size));
    }
  }
  if (machine_of_rank.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  "a hierarchical exchange needs the machine of each rank, or the parameter ranks");
  }
  if (setup.rank >= machine_of_rank.size()) {
    return Status(StatusCode::kInvalidArgument, name_of(setup.rank) +
                                                    " is not below the number of ranks " +
                                                    std::to_string(machine_of_rank.size()));
  }
  const size_t machines = Machines::create(machine_of_rank, setup.rank).speakers.size();
  if (machines == setup.layout->world_size()) return machine_of_rank;
  return Status(StatusCode::kInvalidArgument,
                "the layout is for " + std::to_string(setup.layout->world_size()) +
                    " machines, there are " + std::to_string(machines));
}

Result<std::unique_ptr<Exchange>> make(const ExchangeChoice& choice, ExchangeSetup& setup) {
  Result<std::vector<uint32_t>> machine_of_rank = machines_of(choice, setup);
  if (!machine_of_rank.ok()) return machine_of_rank.status();
  const uint32_t rank = setup.rank;
  const Reduction reduction = setup.options.reduction;
  Machines machines = Machines::create(machine_of_rank.value(), rank);
  std::string description = "exchange hierarchical, " + std::string(choice.inner().name) +
                            " between machines" + (reduction == Reduction::kSum ? ", sum" : "") +
                            "\n";
  for (uint32_t r = 0; r < machines.world_size; ++r) {
    description += name_of(r) + " on machine " + std::to_string(machine_of_rank.value()[r]) + "\n";
  }
  description += setup.layout->describe();
  Result<RawBucket> raw = RawBucket::create(setup.layout->numel(), setup.codecs);
  if (!raw.ok()) return raw.status();
  std::shared_ptr<const Layout> layout = setup.layout;
  std::unique_ptr<Exchange> speakers;
  if (machines.speaker() == rank) {
    setup.rank = machines.mine;
    setup.options.machine_of_rank.clear();
    Result<std::unique_ptr<Exchange>> made =
        make_exchange(choice.inner(), choice, std::move(setup));
    if (!made.ok()) return made.status();
    speakers = std::move(made).value();
  }
  return std::unique_ptr<Exchange>(std::make_unique<HierarchicalExchange>(
      std::move(layout), rank, std::move(machines), std::move(description), choice.inner(),
      reduction, std::move(speakers), std::move(raw).value()));
}

constexpr CodecParameter kParameters[] = {
    {"between", "sharded", "EXCHANGE", "what the speakers of the machines do"},
    {"ranks", "as the engine finds", "RANKS_PER_MACHINE", "ranks that each machine holds"},
};

constexpr ExchangeInfo kInfo = {
    .name = "hierarchical",
    .summary = "one rank of each machine exchanges with the other machines, for all of its ranks",
    .source = "INCEPTIONN, figure 1",
    .between_machines = true,
    .parameters = kParameters};

}  // namespace

const ExchangeEntry exchange_entries::hierarchical = {&kInfo, make};

}  // namespace gradwire
