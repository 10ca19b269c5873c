#include <algorithm>
#include <utility>

#include "base/return_if_error.h"
#include "exchange/steps/exchange_entry.h"
#include "exchange/steps/packet_exchange.h"

namespace gradwire {
namespace {

// Shard k goes from rank k + 1 around to rank k and is summed on its way, then from rank k around
// to rank k - 1. The shards do not depend on each other, so their messages may arrive in any
// order; the digest in a packet identifies its shard.
class RingExchange final : public PacketExchange<> {
 public:
  // legs: kPushAndPull or kPull
  RingExchange(Endpoint endpoint, Legs legs)
      : PacketExchange(std::move(endpoint)),
        legs_(legs),
        rank_(ranks().own()),
        left_((rank_ + ranks().count() - 1) % ranks().count()),
        right_((rank_ + 1) % ranks().count()),
        broken_at_(ranks().count()),
        passed_on_(ranks().count()) {}

  std::vector<uint32_t> awaiting() const override {
    return done() ? std::vector<uint32_t>() : std::vector<uint32_t>{left_};
  }
  bool done() const override { return pushes_.complete() && pulls_.complete(); }
  void retract() override;

 private:
  Status begin() override;
  Status begin_push();
  Status begin_pull();
  Status send_average(FirstNonFinite origin);
  Status take(ReceivedPacket received) override;
  Status take_push(uint32_t shard, const Packet& packet);
  Status take_pull(uint32_t shard, const ReceivedPacket& received);
  // Sends the sum so far (or the average) to the next rank, or a marker if it is not finite.
  // Returns the marker's origin; nothing if the sum was sent.
  Result<FirstNonFinite> send_on(uint32_t shard, Direction direction, FirstNonFinite origin,
                                 std::span<const uint32_t> to_check);

  Legs legs_;
  uint32_t rank_;
  uint32_t left_;
  uint32_t right_;
  Arrivals pushes_;  // of each shard
  Arrivals pulls_;
  FirstNonFinite non_finite_;                       // of this rank's input
  std::vector<std::optional<uint32_t>> broken_at_;  // the origin of each shard's marker
  std::vector<std::vector<std::byte>> passed_on_;   // each shard's pull
};

Status RingExchange::begin() {
  if (ranks().count() == 1) return endpoint_.residuals().pay().status();
  // A shard's sum begins one rank after its owner; its average ends one rank before its owner.
  pulls_.await(ranks().owners(), rank_);
  std::ranges::fill(broken_at_, std::nullopt);
  non_finite_.reset();
  return legs_ == Legs::kPull ? begin_pull() : begin_push();
}

Status RingExchange::begin_push() {
  pushes_.await(ranks().owners(), left_);
  // A step that will be skipped must not change any residual here, so all shards are checked.
  const std::span<const uint32_t> to_check = endpoint_.to_check(ranks().everyone());
  if (ranks().is_owner(left_)) {
    GW_ASSIGN_OR_RETURN(non_finite_, send_on(left_, Direction::kPush, std::nullopt, to_check));
  } else {
    GW_ASSIGN_OR_RETURN(non_finite_, endpoint_.encode({}, to_check));
  }
  endpoint_.sample_error_norm();
  return {};
}

Status RingExchange::begin_pull() {
  if (!ranks().is_owner(rank_)) return {};
  return send_average(std::nullopt);
}

// Sends this rank's own shard, whose average is complete.
Status RingExchange::send_average(FirstNonFinite origin) {
  GW_ASSIGN_OR_RETURN(const FirstNonFinite sent,
                      send_on(rank_, Direction::kPull, origin,
                              endpoint_.to_check(std::span<const uint32_t>(&rank_, 1))));
  if (!sent) return {};
  broken_at_[rank_] = endpoint_.origins().leg_rank(*sent);
  endpoint_.mark_non_finite(rank_, *sent);
  return {};
}

Status RingExchange::take(ReceivedPacket received) {
  GW_RETURN_IF_ERROR(endpoint_.check_step(received, done()));
  const uint32_t shard = received.shard;
  const bool push = received.is_push();
  const std::string sent = name_of(received.peer) + " sent the " + (push ? "sum" : "average") +
                           " of shard " + std::to_string(shard);
  if (received.peer != left_ || shard == (push ? left_ : rank_)) {
    return unexpected(sent + " to " + name_of(rank_));
  }
  if (!(push ? pushes_ : pulls_).take(shard)) return unexpected(sent + " twice");
  return push ? take_push(shard, received.packet) : take_pull(shard, received);
}

Status RingExchange::take_push(uint32_t shard, const Packet& packet) {
  const bool last = shard == rank_;
  if (!packet.non_finite) {
    GW_RETURN_IF_ERROR(
        endpoint_.decode(shard, packet, DecodeMode::kAdd,
                         {.divisor = last ? endpoint_.divisor() : 1.0f, .encode = true}));
  }
  if (last) return send_average(packet.non_finite);
  return send_on(shard, Direction::kPush, packet.non_finite, endpoint_.to_check({&shard, 1}))
      .status();
}

Result<FirstNonFinite> RingExchange::send_on(uint32_t shard, Direction direction,
                                             FirstNonFinite origin,
                                             std::span<const uint32_t> to_check) {
  if (!origin) origin = non_finite_;
  if (!origin) {
    GW_ASSIGN_OR_RETURN(origin, endpoint_.encode({&shard, 1}, to_check));
  }
  endpoint_.send(right_, direction, endpoint_.finish(shard, origin));
  return origin;
}

Status RingExchange::take_pull(uint32_t shard, const ReceivedPacket& received) {
  if (right_ != shard) {
    passed_on_[shard].assign(received.message.begin(), received.message.end());
    endpoint_.send(right_, Direction::kPull, passed_on_[shard]);
  }
  const Packet& packet = received.packet;
  if (!packet.non_finite) return endpoint_.decode(shard, packet, DecodeMode::kStore);
  broken_at_[shard] = endpoint_.origins().leg_rank(*packet.non_finite);
  endpoint_.mark_non_finite(shard, *packet.non_finite);
  return {};
}

void RingExchange::retract() {
  for (uint32_t shard : ranks().everyone()) {
    // Each rank's packet contains the sum that the rank received, so putting back a packet puts
    // back all contributions up to it. Therefore only the last rank that sent a finite sum puts it
    // back: the owner, or the rank before the origin of the marker.
    const bool last = broken_at_[shard] ? *broken_at_[shard] == right_ : shard == rank_;
    if (last) endpoint_.put_back(shard);
  }
}

constexpr ExchangeLeg kLegs[] = {{Route::kAround, Direction::kPush},
                                 {Route::kAround, Direction::kPull}};

constexpr ExchangeInfo kInfo = {.name = "ring",
                                .summary = "sums go around a ring, in which only neighbours talk",
                                .source = "INCEPTIONN, algorithm 1",
                                .default_codec = "int8",
                                .encodes_sums_on_the_way = true,
                                .legs = kLegs};

Result<std::unique_ptr<Exchange>> make(const ExchangeSetup& setup, const char* name, Legs legs) {
  GW_RETURN_IF_ERROR(check_rank(*setup.layout, setup.rank));
  GW_ASSIGN_OR_RETURN(Endpoint endpoint, Endpoint::create(setup, describe_exchange(setup, name)));
  return std::unique_ptr<Exchange>(std::make_unique<RingExchange>(std::move(endpoint), legs));
}

}  // namespace

const ExchangeEntry exchange_entries::ring = {
    &kInfo,
    [](const ExchangeChoice&, ExchangeSetup& setup) {
      return make(setup, "ring", Legs::kPushAndPull);
    },
    [](ExchangeSetup& setup) { return make(setup, "ring, pulls alone", Legs::kPull); }};

}  // namespace gradwire
