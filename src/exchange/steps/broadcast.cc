#include <utility>

#include "base/return_if_error.h"
#include "exchange/steps/exchange_entry.h"
#include "exchange/steps/packet_exchange.h"
#include "exchange/steps/packets_in_order.h"

namespace gradwire {
namespace {

// Every rank pushes the whole bucket to every other rank, and adds up the pushes of all ranks, its
// own included, in ascending order of ranks. So all ranks compute the same bits.
class BroadcastExchange final : public PacketExchange<> {
 public:
  explicit BroadcastExchange(Endpoint endpoint)
      : PacketExchange(std::move(endpoint)),
        whole_(ranks().shards().last(1)),
        in_order_(ranks().count()) {}

  std::vector<uint32_t> awaiting() const override { return pushes_.missing(); }
  bool done() const override { return pushes_.complete(); }
  // A rank that sent a marker has nothing to put back.
  void retract() override { endpoint_.put_back(whole_[0]); }

 private:
  Status begin() override;
  Status take(ReceivedPacket received) override;
  // Adds the pushes that are next in order.
  Status add();
  // Notes a push that is not finite. Of several, all ranks report that of the lowest rank.
  void note(const NonFiniteOrigin& origin) {
    if (!non_finite_ || origin.rank < non_finite_->rank) non_finite_ = origin;
  }

  std::span<const uint32_t> whole_;  // the shard of all values
  Arrivals pushes_;
  PacketsInOrder in_order_;
  FirstNonFinite non_finite_;
};

Status BroadcastExchange::begin() {
  if (ranks().peers().empty()) return endpoint_.residuals().pay().status();
  pushes_.await(ranks().everyone(), rank());
  in_order_.begin();
  non_finite_.reset();
  GW_ASSIGN_OR_RETURN(const FirstNonFinite own,
                      endpoint_.encode(whole_, endpoint_.to_check(whole_)));
  const std::span<const std::byte> packet = endpoint_.finish(whole_[0], own);
  for (uint32_t peer : ranks().peers()) endpoint_.send(peer, Direction::kPush, packet);
  if (own) {
    note(*own);
    in_order_.put(rank(), {});
    return {};
  }
  endpoint_.sample_error_norm();
  in_order_.put(rank(), ReceivedPacket{.peer = rank(),
                                       .shard = whole_[0],
                                       .packet = endpoint_.encoded(whole_[0]),
                                       .message = {}});
  return add();
}

Status BroadcastExchange::take(ReceivedPacket received) {
  GW_RETURN_IF_ERROR(endpoint_.check_step(received, done()));
  const uint32_t peer = received.peer;
  if (!received.is_push() || received.shard != whole_[0]) {
    return unexpected(name_of(peer) + " sent a packet that is no push of its bucket");
  }
  if (!pushes_.take(peer)) return unexpected(name_of(peer) + " sent its push of this step twice");
  if (received.packet.non_finite) {
    note(*received.packet.non_finite);
    in_order_.put(peer, {});
  } else {
    in_order_.put(peer, std::move(received));
  }
  GW_RETURN_IF_ERROR(add());
  if (done() && non_finite_) endpoint_.mark_non_finite(whole_[0], *non_finite_);
  return {};
}

Status BroadcastExchange::add() {
  const bool first = in_order_.none_taken();
  const std::vector<const Packet*> packets = in_order_.next();
  if (!packets.empty() && !non_finite_) {
    GW_RETURN_IF_ERROR(
        endpoint_.decode(whole_[0], packets, first ? DecodeMode::kStore : DecodeMode::kAdd,
                         {.divisor = in_order_.all_taken() ? endpoint_.divisor() : 1.0f}));
  }
  in_order_.drop();
  return {};
}

// A pull codec that differs was given for nothing.
Status check_codecs(const Layout& layout) {
  for (const Segment& segment : layout.segments()) {
    const std::string push = segment.push_codec->text();
    const std::string pull = segment.pull_codec->text();
    if (push == pull) continue;
    return {StatusCode::kInvalidArgument,
            "exchange broadcast has no pulls, so a tensor takes one codec: '" +
                layout.tensors()[segment.tensor].name + "' has " + push + " for pushes and " +
                pull + " for pulls; leave the codec of pulls out, and the direction of rules"};
  }
  return {};
}

Result<std::unique_ptr<Exchange>> make(const ExchangeChoice&, ExchangeSetup& setup) {
  GW_RETURN_IF_ERROR(check_rank(*setup.layout, setup.rank));
  GW_RETURN_IF_ERROR(check_not_padded(*setup.layout));
  GW_RETURN_IF_ERROR(check_codecs(*setup.layout));
  setup.layout = std::make_shared<const Layout>(setup.layout->without_owners());
  GW_ASSIGN_OR_RETURN(Endpoint endpoint,
                      Endpoint::create(setup, describe_exchange(setup, "broadcast")));
  return std::unique_ptr<Exchange>(std::make_unique<BroadcastExchange>(std::move(endpoint)));
}

constexpr ExchangeLeg kLegs[] = {{Route::kToAll, Direction::kPush}};

constexpr ExchangeInfo kInfo = {
    .name = "broadcast",
    .summary = "every rank sends its values, encoded once, to all others, which add them up",
    .source = "QSGD, algorithm 1",
    // The paper's codec. Nothing but its unbiased error remains, and that falls with 1 / N.
    .default_codec = "qsgd:bits=4",
    .has_owners = false,
    .legs = kLegs};

}  // namespace

const ExchangeEntry exchange_entries::broadcast = {&kInfo, make};

}  // namespace gradwire
