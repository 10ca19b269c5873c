#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/checksum.h"
#include "base/return_if_error.h"
#include "exchange/steps/exchange_entry.h"
#include "exchange/steps/packet_exchange.h"
#include "exchange/steps/sharded.h"

namespace gradwire {
namespace {

// The machines and their ranks, as one rank sees them.
struct Machines {
  std::vector<uint32_t> speakers;  // the lowest rank of each machine, in ascending order
  std::vector<uint32_t> sizes;     // the number of ranks on each machine
  std::vector<uint32_t> members;   // ranks of this rank's machine, in ascending order
  std::vector<uint32_t> of_rank;   // the index of each rank's machine
  uint32_t mine = 0;               // index of this rank's machine
  uint32_t place = 0;              // index of this rank in `members`
  uint32_t world_size = 0;

  static Machines create(const std::vector<uint32_t>& machine_of_rank, uint32_t rank) {
    Machines machines;
    machines.world_size = static_cast<uint32_t>(machine_of_rank.size());
    std::map<uint32_t, uint32_t> indexes;  // of machines, in the order of their speakers
    for (uint32_t r = 0; r < machines.world_size; ++r) {
      const auto next = static_cast<uint32_t>(machines.speakers.size());
      const auto [found, is_new] = indexes.emplace(machine_of_rank[r], next);
      const uint32_t machine = found->second;
      if (is_new) {
        machines.speakers.push_back(r);
        machines.sizes.push_back(0);
      }
      ++machines.sizes[machine];
      machines.of_rank.push_back(machine);
      if (machine_of_rank[r] != machine_of_rank[rank]) continue;
      machines.mine = machine;
      if (r == rank) machines.place = static_cast<uint32_t>(machines.members.size());
      machines.members.push_back(r);
    }
    return machines;
  }

  [[nodiscard]] uint32_t speaker() const { return members.front(); }
  [[nodiscard]] bool equally_large() const {
    return std::ranges::all_of(sizes, [&](uint32_t size) { return size == sizes.front(); });
  }
};

// The three legs of a step, in their order. Each is an exchange of its own.
enum Leg : uint8_t {
  kWithin,   // the ranks of a machine
  kBetween,  // the speakers of all machines; other ranks have no such leg
  kResult,   // a machine's speaker to its ranks
  kDone,
};

struct LegExchange {
  std::unique_ptr<Exchange> exchange;
  std::vector<uint32_t> ranks;  // of the job, in the order of the leg's own numbers
};

struct Plan {
  std::shared_ptr<const Layout> layout;  // of the speakers
  Machines machines;
  std::string description;
  std::array<LegExchange, kDone> legs;
  std::unique_ptr<ShardCodec> whole;  // the bucket as one shard, that of the speaker
  float divisor;                      // of the sums of a machine's ranks; 1: they are averages
  bool checks_result;  // whether all ranks skip a step that is not finite, and only the decoded
                       // result may show it
  std::shared_ptr<std::optional<NonFiniteInput>> found;  // by the legs of this step so far
};

class HierarchicalExchange final : public Exchange {
 public:
  explicit HierarchicalExchange(Plan plan)
      : plan_(std::move(plan)),
        result_digest_(shard_digest(leg(kResult).exchange->describe(), 0)) {}

  std::string describe() const override { return plan_.description; }
  Status start(std::span<float> bucket, uint64_t step) override;
  std::vector<OutgoingMessage> take_outgoing() override;
  std::vector<uint32_t> awaiting() const override;
  uint64_t max_message_size() const override;
  Status receive(uint32_t peer, std::span<const std::byte> message) override;
  bool done() const override { return at_ == kDone; }
  const std::optional<NonFiniteInput>& non_finite() const override { return *plan_.found; }

  // Only the speakers keep residuals.
  bool keeps_residuals() const noexcept override { return any_residuals(*plan_.layout); }
  std::vector<OutgrownResidual> outgrown_residuals() const override {
    return between() ? between()->outgrown_residuals() : std::vector<OutgrownResidual>();
  }
  std::vector<TensorTraffic> tensor_traffic() const override {
    return between() ? between()->tensor_traffic()
                     : std::vector<TensorTraffic>(layout().tensors().size());
  }
  void retract() override {
    if (between()) between()->retract();
  }
  void scale_residuals(float factor) override {
    if (between()) between()->scale_residuals(factor);
  }
  std::vector<ResidualPiece> export_residuals() const override {
    return between() ? between()->export_residuals() : std::vector<ResidualPiece>();
  }
  Status import_residual(const ResidualPiece& piece) override {
    return between() ? between()->import_residual(piece) : Status();
  }
  uint64_t residual_bytes() const override { return between() ? between()->residual_bytes() : 0; }
  void keep_residuals_in(std::span<std::byte> memory) override {
    if (between()) between()->keep_residuals_in(memory);
  }
  const ExchangeStats& stats() const noexcept override { return stats_; }
  const Layout& layout() const noexcept override { return *plan_.layout; }

 protected:
  uint32_t rank() const override { return plan_.machines.members[plan_.machines.place]; }

 private:
  struct EarlyMessage {
    Leg leg;
    uint32_t source;  // in the leg's numbers
    std::vector<std::byte> bytes;
  };

  [[nodiscard]] const LegExchange& leg(Leg which) const { return plan_.legs[which]; }
  // Null on ranks that are not speakers.
  [[nodiscard]] Exchange* between() const { return leg(kBetween).exchange.get(); }
  // The leg of a message; kUnexpectedMessage: `peer` has no business with this rank.
  [[nodiscard]] Result<Leg> leg_of(uint32_t peer, std::span<const std::byte> message) const;
  Status begin_leg();
  Status hand_over(uint32_t source, std::span<const std::byte> message);
  // Goes on to the next legs while the present one is done.
  Status advance();
  Status end_step();
  Status find_non_finite();
  void count();

  Plan plan_;
  uint64_t result_digest_;  // of the packets in the leg kResult
  Leg at_ = kDone;
  std::vector<EarlyMessage> early_;  // of legs that have not begun
  std::span<float> bucket_;
  uint64_t step_ = 0;
  uint64_t non_finite_steps_ = 0;
  ExchangeStats stats_;
};

Status HierarchicalExchange::start(std::span<float> bucket, uint64_t step) {
  GW_RETURN_IF_ERROR(check_start(*this, bucket.size()));
  bucket_ = bucket;
  step_ = step;
  plan_.found->reset();
  early_.clear();
  plan_.whole->begin(bucket);
  at_ = kWithin;
  GW_RETURN_IF_ERROR(begin_leg());
  return advance();
}

std::vector<OutgoingMessage> HierarchicalExchange::take_outgoing() {
  std::vector<OutgoingMessage> messages;
  for (const LegExchange& leg : plan_.legs) {
    if (!leg.exchange) continue;
    for (OutgoingMessage& message : leg.exchange->take_outgoing()) {
      message.peer = leg.ranks[message.peer];
      messages.push_back(std::move(message));
    }
  }
  return messages;
}

std::vector<uint32_t> HierarchicalExchange::awaiting() const {
  if (done()) return {};
  std::vector<uint32_t> peers = leg(at_).exchange->awaiting();
  for (uint32_t& peer : peers) peer = leg(at_).ranks[peer];
  return peers;
}

uint64_t HierarchicalExchange::max_message_size() const {
  uint64_t size = 0;
  for (const LegExchange& leg : plan_.legs) {
    if (leg.exchange) size = std::max(size, leg.exchange->max_message_size());
  }
  return size;
}

Result<Leg> HierarchicalExchange::leg_of(uint32_t peer, std::span<const std::byte> message) const {
  if (std::ranges::count(leg(kWithin).ranks, peer) > 0) {
    return read_layout_digest(message) == result_digest_ ? kResult : kWithin;
  }
  if (between() && std::ranges::count(leg(kBetween).ranks, peer) > 0) return kBetween;
  return unexpected(name_of(peer) + " sent " + name_of(rank()) +
                    " a message, which talks to its machine" +
                    (between() ? " and to the speakers of the others" : " alone"));
}

Status HierarchicalExchange::receive(uint32_t peer, std::span<const std::byte> message) {
  if (done()) return unexpected(name_of(peer) + " sent a message, but no step is under way");
  GW_ASSIGN_OR_RETURN(const Leg to, leg_of(peer, message));
  const std::vector<uint32_t>& ranks = leg(to).ranks;
  const auto source = static_cast<uint32_t>(std::ranges::find(ranks, peer) - ranks.begin());
  if (to > at_) {
    early_.push_back({to, source, std::vector(message.begin(), message.end())});
    return {};
  }
  if (to < at_) {
    return unexpected(name_of(peer) + " sent " + name_of(rank()) +
                      " a message of a leg that is over");
  }
  GW_RETURN_IF_ERROR(hand_over(source, message));
  return advance();
}

// A leg's message with this exchange's ranks: `ranks[i]` for the leg's rank i. Its steps name ranks
// by name_of alone.
std::string with_ranks(std::string_view message, std::span<const uint32_t> ranks) {
  constexpr std::string_view kWord = "rank ";
  std::string result;
  while (true) {
    const size_t end = message.find(kWord);
    if (end == message.npos) return result.append(message);
    result.append(message.substr(0, end + kWord.size()));
    message.remove_prefix(end + kWord.size());
    uint32_t rank = 0;
    const auto [rest, error] =
        std::from_chars(message.data(), message.data() + message.size(), rank);
    if (error != std::errc() || rank >= ranks.size()) continue;
    result += std::to_string(ranks[rank]);
    message.remove_prefix(static_cast<size_t>(rest - message.data()));
  }
}

Status HierarchicalExchange::hand_over(uint32_t source, std::span<const std::byte> message) {
  Status status = leg(at_).exchange->receive(source, message);
  if (status.ok()) return status;
  return {status.code(), with_ranks(status.message(), leg(at_).ranks)};
}

Status HierarchicalExchange::begin_leg() {
  GW_RETURN_IF_ERROR(leg(at_).exchange->start(bucket_, step_));
  std::vector<EarlyMessage> later;
  for (EarlyMessage& message : std::exchange(early_, {})) {
    if (message.leg != at_) {
      later.push_back(std::move(message));
    } else {
      GW_RETURN_IF_ERROR(hand_over(message.source, message.bytes));
    }
  }
  early_ = std::move(later);
  return {};
}

Status HierarchicalExchange::advance() {
  while (!done() && leg(at_).exchange->done()) {
    if (const auto& found = leg(at_).exchange->non_finite()) *plan_.found = found;
    if (at_ == kResult) return end_step();
    if (at_ == kWithin && between()) {
      if (plan_.divisor != 1.0f) plan_.whole->divide(0, plan_.divisor);
      at_ = kBetween;
    } else {
      at_ = kResult;
    }
    GW_RETURN_IF_ERROR(begin_leg());
  }
  return {};
}

Status HierarchicalExchange::end_step() {
  at_ = kDone;
  if (!*plan_.found && plan_.checks_result) GW_RETURN_IF_ERROR(find_non_finite());
  if (*plan_.found) ++non_finite_steps_;
  count();
  return {};
}

Status HierarchicalExchange::find_non_finite() {
  const uint32_t shards[] = {0};
  GW_ASSIGN_OR_RETURN(const FirstNonFinite found, plan_.whole->find_non_finite(shards));
  if (!found) return {};
  const uint64_t element = found->element;  // of the bucket
  const Layout& layout = *plan_.layout;
  const auto segment = std::ranges::find_if(layout.segments(), [&](const Segment& candidate) {
    return element - candidate.bucket_offset < candidate.n;
  });
  *plan_.found = {.rank = plan_.machines.speaker(),  // it encoded the value
                  .tensor = layout.tensors()[segment->tensor].name,
                  .element = segment->tensor_offset + element - segment->bucket_offset};
  return {};
}

void HierarchicalExchange::count() {
  const ExchangeStats& within = leg(kWithin).exchange->stats();
  stats_ = between() ? between()->stats() : ExchangeStats{.steps = within.steps};
  stats_.non_finite_steps = non_finite_steps_;
  for (const ExchangeStats* local : {&within, &leg(kResult).exchange->stats()}) {
    stats_.local_bytes_sent += local->push_bytes_sent + local->pull_bytes_sent;
    stats_.encode_seconds += local->encode_seconds;
    stats_.decode_seconds += local->decode_seconds;
  }
}

// The machine of each rank. kInvalidArgument: they don't fit the layout, or there is no such rank.
Result<std::vector<uint32_t>> machines_of(const ExchangeChoice& choice,
                                          const ExchangeSetup& setup) {
  std::vector<uint32_t> machine_of_rank = setup.options.machine_of_rank;
  const uint32_t size = choice.ranks_per_machine();
  const uint64_t ranks = machine_of_rank.empty() ? uint64_t{setup.layout->world_size()} * size
                                                 : machine_of_rank.size();
  if (ranks > kMaxWorldSize) {
    return Status(StatusCode::kInvalidArgument,
                  "a hierarchical exchange has at most " + std::to_string(kMaxWorldSize) +
                      " ranks, got " + std::to_string(ranks) + " on " +
                      std::to_string(setup.layout->world_size()) + " machines");
  }
  if (machine_of_rank.empty()) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      machine_of_rank.push_back(rank / size);
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

// The pattern that matches this name alone.
std::string pattern_of(std::string_view name) {
  std::string pattern;
  for (char c : name) {
    if (std::string_view("*?[]\\").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

// The options of a layout inside a machine: raw tensors are raw there, too.
LayoutOptions options_within(const Layout& layout, const std::string& codec) {
  LayoutOptions options = {.codec = codec};
  for (const Segment& segment : layout.segments()) {
    if (segment.raw_reason.empty()) continue;
    options.exclude.push_back(pattern_of(layout.tensors()[segment.tensor].name));
  }
  return options;
}

// Makes the exchanges inside a machine, one after the other. marks: whether all ranks skip a step
// that is not finite.
class LegMaker {
 public:
  LegMaker(const ExchangeChoice& choice, const ExchangeSetup& setup, const Machines& machines,
           std::shared_ptr<const std::optional<NonFiniteInput>> found, bool marks)
      : choice_(choice),
        setup_(setup),
        machines_(machines),
        found_(std::move(found)),
        marks_(marks) {}

  Result<LegExchange> within(Reduction reduction) const {
    const bool star = choice_.within() == nullptr;
    // Draws differ from machine to machine.
    GW_ASSIGN_OR_RETURN(ExchangeSetup setup, of(owned_by_speaker(star), machines_.mine));
    setup.options.reduction = reduction;
    // Once the values are added, nobody knows whose was not finite. A speaker that alone adds looks
    // at the sum: what no other rank has found is its own, or the sum's.
    setup.marks_non_finite = marks_ && (!star || machines_.place > 0);
    return leg(star ? make_reduce_scatter_exchange(std::move(setup))
                    : make_exchange(*choice_.within(), choice_, std::move(setup)));
  }

  // All speakers have the same values and make the same draws, so they send the same bytes.
  Result<LegExchange> result() const {
    GW_ASSIGN_OR_RETURN(ExchangeSetup setup, of(owned_by_speaker(true), machines_.speakers.size()));
    return leg(make_allgather_exchange(choice_.within(), std::move(setup)));
  }

  // The ranks of the leg between machines, which are the speakers, in markers.
  [[nodiscard]] Origins origins_between() const {
    return {.outer_ranks = machines_.speakers, .leg_ranks = machines_.of_rank, .known = found_};
  }

  // The whole bucket as one value in the place of the speaker's shard.
  Result<std::unique_ptr<ShardCodec>> whole() const {
    GW_ASSIGN_OR_RETURN(Layout layout,
                        Layout::create({{"", {setup_.layout->numel()}}}, 1, {.codec = "raw"}));
    return setup_.codecs(std::make_shared<const Shards>(
        std::make_shared<const Layout>(std::move(layout)), 0, setup_.options.seed));
  }

 private:
  [[nodiscard]] LayoutOptions owned_by_speaker(bool owned) const {
    LayoutOptions options = options_within(*setup_.layout, choice_.within_codec());
    if (owned) options.owner = 0;
    return options;
  }

  // The setup of a leg. `number`: of its own, so that no draws of two legs depend on each other.
  Result<ExchangeSetup> of(const LayoutOptions& options, uint64_t number) const {
    GW_ASSIGN_OR_RETURN(Layout layout,
                        Layout::create(setup_.layout->tensors(),
                                       static_cast<uint32_t>(machines_.members.size()), options));
    const uint64_t seeds[] = {setup_.options.seed, number};
    // The values of ranks on other machines come through the speaker.
    Origins origins = {.outer_ranks = machines_.members,
                       .leg_ranks = std::vector<uint32_t>(machines_.world_size, 0),
                       .known = found_};
    for (uint32_t place = 0; place < machines_.members.size(); ++place) {
      origins.leg_ranks[machines_.members[place]] = place;
    }
    return ExchangeSetup{.layout = std::make_shared<const Layout>(std::move(layout)),
                         .rank = machines_.place,
                         .codecs = setup_.codecs,
                         .options = {.seed = digest64(std::as_bytes(std::span(seeds)), {})},
                         .origins = std::move(origins)};
  }

  Result<LegExchange> leg(Result<std::unique_ptr<Exchange>> made) const {
    if (!made.ok()) {
      return Status(made.status().code(), "inside a machine: " + made.status().message());
    }
    return LegExchange{.exchange = std::move(made).value(), .ranks = machines_.members};
  }

  const ExchangeChoice& choice_;
  const ExchangeSetup& setup_;
  const Machines& machines_;
  std::shared_ptr<const std::optional<NonFiniteInput>> found_;
  bool marks_;
};

std::string describe(const ExchangeChoice& choice, const ExchangeSetup& setup,
                     const std::vector<uint32_t>& machine_of_rank) {
  std::string text = describe_exchange(
      setup, "hierarchical, " + std::string(choice.inner().name) + " between machines");
  std::string further;
  if (choice.within() != nullptr) further += std::string(choice.within()->name) + " ";
  further += "inside machines, codec " + choice.within_codec() + "\n";
  // Where speakers of different seeds draw, the machines would end with different values.
  if (Codec::parse(choice.within_codec()).value()->info().draws) {
    further += "seed " + std::to_string(setup.options.seed) + "\n";
  }
  for (uint32_t r = 0; r < machine_of_rank.size(); ++r) {
    further += name_of(r) + " on machine " + std::to_string(machine_of_rank[r]) + "\n";
  }
  return text.insert(text.find('\n') + 1, further);  // before the layout, which depends on it
}

Result<std::unique_ptr<Exchange>> make(const ExchangeChoice& choice, ExchangeSetup& setup) {
  GW_RETURN_IF_ERROR(check_not_padded(*setup.layout));
  GW_ASSIGN_OR_RETURN(const std::vector<uint32_t> machine_of_rank, machines_of(choice, setup));
  Plan plan = {.layout = setup.layout,
               .machines = Machines::create(machine_of_rank, setup.rank),
               .description = describe(choice, setup, machine_of_rank),
               .legs = {},
               .whole = nullptr,
               .divisor = 1.0f,
               .checks_result = false,
               .found = std::make_shared<std::optional<NonFiniteInput>>()};
  const Machines& machines = plan.machines;
  const auto skips = [](const ExchangeInfo* info) {
    return info != nullptr && info->always_skips_non_finite;
  };
  const bool marks = any_residuals(*setup.layout) || skips(choice.within()) ||
                     (skips(&choice.inner()) && machines.speakers.size() > 1);
  const LegMaker maker(choice, setup, machines, plan.found, marks);
  // The speakers average over the machines. If a machine has more ranks than another, its values
  // count more: its ranks then add, and the sum is divided by the mean number of ranks.
  Reduction reduction = setup.options.reduction;
  if (reduction == Reduction::kAverage && !machines.equally_large()) {
    reduction = Reduction::kSum;
    plan.divisor =
        static_cast<float>(machines.world_size) / static_cast<float>(machines.speakers.size());
  }
  GW_ASSIGN_OR_RETURN(plan.legs[kWithin], maker.within(reduction));
  GW_ASSIGN_OR_RETURN(plan.legs[kResult], maker.result());
  GW_ASSIGN_OR_RETURN(plan.whole, maker.whole());
  // A result that is sent unchanged is finite, unless the leg between machines has said otherwise.
  plan.checks_result = marks && choice.compresses_within();
  plan.legs[kBetween].ranks = machines.speakers;
  if (machines.place == 0) {
    setup.rank = machines.mine;
    setup.options.machine_of_rank.clear();
    setup.origins = maker.origins_between();
    GW_ASSIGN_OR_RETURN(plan.legs[kBetween].exchange,
                        make_exchange(choice.inner(), choice, std::move(setup)));
  }
  return std::unique_ptr<Exchange>(std::make_unique<HierarchicalExchange>(std::move(plan)));
}

constexpr CodecParameter kParameters[] = {
    {"between", "sharded", "EXCHANGE", "what the speakers of the machines do"},
    {"within", "each rank sends to its speaker", "EXCHANGE", "what the ranks of a machine do"},
    {"ranks", "as the engine finds", "RANKS_PER_MACHINE", "ranks that each machine holds"},
    {"within_codec", "raw", "CODEC", "codec inside a machine; it stands last"},
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
