#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/return_if_error.h"
#include "exchange/steps/exchange_entry.h"
#include "exchange/steps/packet_exchange.h"
#include "exchange/steps/sharded.h"

namespace gradwire {
namespace {

// The machines and their ranks, as one rank sees them.
struct Machines {
  std::vector<uint32_t> speakers;  // the lowest rank of each machine, in ascending order
  std::vector<uint32_t> members;   // ranks of this rank's machine, without the speaker
  uint32_t mine = 0;               // index of this rank's machine
  uint32_t world_size = 0;

  static Machines create(const std::vector<uint32_t>& machine_of_rank, uint32_t rank) {
    Machines machines;
    const auto machine_of = [&](uint32_t r) { return machine_of_rank[r]; };
    for (uint32_t r = 0; r < machine_of_rank.size(); ++r) {
      const bool here = machine_of(r) == machine_of(rank);
      if (std::ranges::count(machines.speakers, machine_of(r), machine_of) == 0) {
        if (here) machines.mine = static_cast<uint32_t>(machines.speakers.size());
        machines.speakers.push_back(r);
      } else if (here) {
        machines.members.push_back(r);
      }
    }
    machines.world_size = static_cast<uint32_t>(machine_of_rank.size());
    return machines;
  }

  [[nodiscard]] uint32_t speaker() const { return speakers[mine]; }
};

class HierarchicalExchange final : public Exchange {
 public:
  // `local`: the speaker of this rank's machine owns all values, which are sent uncompressed.
  // `between`: the exchange among the speakers; null on all other ranks.
  HierarchicalExchange(std::shared_ptr<const Layout> layout, Machines machines,
                       const ExchangeInfo& inner, Endpoint local, std::unique_ptr<Exchange> between)
      : layout_(std::move(layout)),
        machines_(std::move(machines)),
        inner_(inner),
        local_(std::move(local)),
        between_(std::move(between)) {}

  std::string describe() const override { return local_.describe(); }
  Status start(std::span<float> bucket, uint64_t step) override;
  std::vector<OutgoingMessage> take_outgoing() override;
  std::vector<uint32_t> awaiting() const override;
  Status receive(uint32_t peer, std::span<const std::byte> message) override;
  bool done() const override { return phase_ == Phase::kDone; }
  const std::optional<NonFiniteInput>& non_finite() const override { return non_finite_; }

  bool keeps_residuals() const noexcept override { return any_residuals(*layout_); }
  std::vector<OutgrownResidual> outgrown_residuals() const override {
    return between_ ? between_->outgrown_residuals() : std::vector<OutgrownResidual>();
  }
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
  uint32_t rank() const override { return local_.rank(); }

 private:
  enum class Phase : uint8_t {
    kDone,
    kParts,    // a speaker waits for the members of its machine
    kBetween,  // the speakers exchange
    kResult,   // a member waits for its speaker
  };

  // Sends the bucket to these ranks of the machine.
  Status send_local(Direction direction, std::span<const uint32_t> ranks);
  // Parses a message that must come from this rank's own machine in this phase.
  Result<ReceivedPacket> open_local(uint32_t peer, std::span<const std::byte> message,
                                    Direction direction);
  Status receive_part(uint32_t peer, std::span<const std::byte> message);
  Status receive_result(uint32_t peer, std::span<const std::byte> message);
  Status receive_between(uint32_t peer, std::span<const std::byte> message);
  Status start_between();
  // Ends the step if the speakers' exchange is done.
  Status after_between();
  // Whether the speakers' exchange skips steps that are not finite.
  [[nodiscard]] bool marks_non_finite() const {
    return keeps_residuals() || (inner_.always_skips_non_finite && machines_.speakers.size() > 1);
  }
  // A member sees only the result. If the result is not finite, the member skips the step.
  Status note_non_finite_result();

  std::shared_ptr<const Layout> layout_;
  Machines machines_;
  const ExchangeInfo& inner_;  // the exchange among the speakers
  Endpoint local_;
  std::unique_ptr<Exchange> between_;

  Phase phase_ = Phase::kDone;
  Arrivals parts_;                                  // of the members
  std::map<uint32_t, ReceivedPacket> early_parts_;  // by rank; arrived before a lower rank's
  std::vector<std::pair<uint32_t, std::vector<std::byte>>> early_between_;  // by index of speaker
  std::optional<NonFiniteInput> non_finite_;
  ExchangeStats stats_;
};

Status HierarchicalExchange::send_local(Direction direction, std::span<const uint32_t> ranks) {
  if (ranks.empty()) return {};
  const uint32_t shards[] = {machines_.speaker()};
  GW_ASSIGN_OR_RETURN(const FirstNonFinite none, local_.encode(shards, {}));
  const std::span<const std::byte> packet = local_.finish(machines_.speaker(), none);
  for (uint32_t rank : ranks) {
    local_.send(rank, direction, packet);
    stats_.local_bytes_sent += packet.size();
  }
  return {};
}

Status HierarchicalExchange::start(std::span<float> bucket, uint64_t step) {
  GW_RETURN_IF_ERROR(check_start(*this, bucket.size()));
  local_.begin(bucket, step);
  non_finite_.reset();
  ++stats_.steps;
  if (!between_) {
    phase_ = Phase::kResult;
    const uint32_t speaker[] = {machines_.speaker()};
    return send_local(Direction::kPush, speaker);
  }
  phase_ = Phase::kParts;
  parts_.await(machines_.members, machines_.speaker());
  return machines_.members.empty() ? start_between() : Status();
}

std::vector<OutgoingMessage> HierarchicalExchange::take_outgoing() {
  std::vector<OutgoingMessage> messages = local_.take_outgoing();
  if (!between_) return messages;
  for (OutgoingMessage& message : between_->take_outgoing()) {
    message.peer = machines_.speakers[message.peer];
    messages.push_back(std::move(message));
  }
  return messages;
}

std::vector<uint32_t> HierarchicalExchange::awaiting() const {
  switch (phase_) {
    case Phase::kDone:
      return {};
    case Phase::kResult:
      return {machines_.speaker()};
    case Phase::kParts:
      return parts_.missing();
    case Phase::kBetween: {
      std::vector<uint32_t> peers = between_->awaiting();
      for (uint32_t& peer : peers) peer = machines_.speakers[peer];
      return peers;
    }
  }
  return {};
}

Result<ReceivedPacket> HierarchicalExchange::open_local(uint32_t peer,
                                                        std::span<const std::byte> message,
                                                        Direction direction) {
  GW_ASSIGN_OR_RETURN(ReceivedPacket received, local_.open(peer, message));
  GW_RETURN_IF_ERROR(local_.check_step(received, done()));
  const PacketHeader& header = received.packet.header;
  if (header.direction == direction && !received.packet.non_finite) return received;
  return unexpected(name_of(peer) + " sent a " + direction_name(header.direction) + " that " +
                    name_of(rank()) + " has no use for");
}

Status HierarchicalExchange::receive(uint32_t peer, std::span<const std::byte> message) {
  if (done()) return unexpected(name_of(peer) + " sent a message, but no step is under way");
  if (!between_) return receive_result(peer, message);
  const bool is_member = std::ranges::binary_search(machines_.members, peer);
  return is_member ? receive_part(peer, message) : receive_between(peer, message);
}

Status HierarchicalExchange::receive_part(uint32_t peer, std::span<const std::byte> message) {
  if (!parts_.take(peer)) {
    return unexpected(name_of(peer) + " sent its part of step " + std::to_string(local_.step()) +
                      " twice");
  }
  GW_ASSIGN_OR_RETURN(ReceivedPacket part, open_local(peer, message, Direction::kPush));
  const auto may_be_added = [&](uint32_t rank) {
    return parts_.complete() || rank < parts_.missing().front();
  };
  if (!may_be_added(peer)) part.keep();
  early_parts_.emplace(peer, std::move(part));
  for (auto next = early_parts_.begin(); next != early_parts_.end() && may_be_added(next->first);
       next = early_parts_.erase(next)) {
    GW_RETURN_IF_ERROR(local_.decode(machines_.speaker(), next->second.packet, DecodeMode::kAdd));
  }
  return parts_.complete() ? start_between() : Status();
}

Status HierarchicalExchange::start_between() {
  // The speakers average over the machines, whatever the machines' sizes.
  if (local_.divisor() != 1.0f) {
    const auto machines = static_cast<float>(machines_.speakers.size());
    local_.divide(machines_.speaker(), local_.divisor() / machines);
  }
  phase_ = Phase::kBetween;
  GW_RETURN_IF_ERROR(between_->start(local_.bucket(), local_.step()));
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
    return unexpected(name_of(peer) + " speaks for no machine, but sent " + name_of(rank()) +
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
  if (!between_->done() || done()) return {};
  non_finite_ = between_->non_finite();
  if (non_finite_) non_finite_->rank = machines_.speakers[non_finite_->rank];
  phase_ = Phase::kDone;
  GW_RETURN_IF_ERROR(send_local(Direction::kPull, machines_.members));
  const uint64_t local_bytes = stats_.local_bytes_sent;
  stats_ = between_->stats();
  stats_.local_bytes_sent = local_bytes;
  stats_.encode_seconds += local_.stats().encode_seconds;
  stats_.decode_seconds += local_.stats().decode_seconds;
  return {};
}

Status HierarchicalExchange::receive_result(uint32_t peer, std::span<const std::byte> message) {
  if (peer != machines_.speaker()) {
    return unexpected(name_of(peer) + " sent " + name_of(rank()) + " a message, which talks to " +
                      name_of(machines_.speaker()) + " alone");
  }
  GW_ASSIGN_OR_RETURN(ReceivedPacket received, open_local(peer, message, Direction::kPull));
  GW_RETURN_IF_ERROR(local_.decode(peer, received.packet, DecodeMode::kStore));
  phase_ = Phase::kDone;
  return marks_non_finite() ? note_non_finite_result() : Status();
}

Status HierarchicalExchange::note_non_finite_result() {
  const uint32_t shards[] = {machines_.speaker()};
  GW_ASSIGN_OR_RETURN(const FirstNonFinite found, local_.find_non_finite(shards));
  if (!found) return {};
  const uint64_t element = found->element;  // of the bucket
  const auto segment = std::ranges::find_if(layout_->segments(), [&](const Segment& candidate) {
    return element - candidate.bucket_offset < candidate.n;
  });
  ++stats_.non_finite_steps;
  non_finite_ = {.rank = machines_.speaker(),
                 .tensor = layout_->tensors()[segment->tensor].name,
                 .element = segment->tensor_offset + element - segment->bucket_offset};
  return {};
}

// The machine of each rank. kInvalidArgument: they don't fit the layout, or there is no such rank.
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

Result<Endpoint> make_local_endpoint(const ExchangeSetup& setup, const Machines& machines,
                                     std::string description) {
  GW_ASSIGN_OR_RETURN(Layout layout,
                      Layout::create({{"", {setup.layout->numel()}}}, machines.world_size,
                                     {.codec = "raw", .owner = machines.speaker()}));
  return Endpoint::create({.layout = std::make_shared<const Layout>(std::move(layout)),
                           .rank = setup.rank,
                           .codecs = setup.codecs,
                           .options = {.reduction = setup.options.reduction}},
                          std::move(description));
}

Result<std::unique_ptr<Exchange>> make(const ExchangeChoice& choice, ExchangeSetup& setup) {
  GW_ASSIGN_OR_RETURN(const std::vector<uint32_t> machine_of_rank, machines_of(choice, setup));
  Machines machines = Machines::create(machine_of_rank, setup.rank);
  std::string description = describe_exchange(
      setup, "hierarchical, " + std::string(choice.inner().name) + " between machines");
  std::string places;
  for (uint32_t r = 0; r < machines.world_size; ++r) {
    places += name_of(r) + " on machine " + std::to_string(machine_of_rank[r]) + "\n";
  }
  description.insert(description.find('\n') + 1, places);  // the layout depends on them
  GW_ASSIGN_OR_RETURN(Endpoint local, make_local_endpoint(setup, machines, std::move(description)));
  std::shared_ptr<const Layout> layout = setup.layout;
  std::unique_ptr<Exchange> between;
  if (machines.speaker() == setup.rank) {
    setup.rank = machines.mine;
    setup.options.machine_of_rank.clear();
    GW_ASSIGN_OR_RETURN(between, make_exchange(choice.inner(), choice, std::move(setup)));
  }
  return std::unique_ptr<Exchange>(
      std::make_unique<HierarchicalExchange>(std::move(layout), std::move(machines), choice.inner(),
                                             std::move(local), std::move(between)));
}

constexpr CodecParameter kParameters[] = {
    {"between", "sharded", "EXCHANGE", "what the speakers of the machines do"},
    {"ranks", "as the engine finds", "RANKS_PER_MACHINE", "ranks that each machine holds"},
};

constexpr ExchangeInfo kInfo = {
    .name = "hierarchical",
    .summary = "one rank of each machine exchanges with the other machines, for all of its ranks",
    .source = "INCEPTIONN, figure 1",
    .default_codec = kShardedCodec,
    .between_machines = true,
    .parameters = kParameters};

}  // namespace

const ExchangeEntry exchange_entries::hierarchical = {&kInfo, make};

}  // namespace gradwire
