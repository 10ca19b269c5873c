#include "exchange/steps/sharded.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/return_if_error.h"

namespace gradwire {

ShardedExchange::ShardedExchange(Endpoint endpoint, Legs legs, ShardUpdate update)
    : PacketExchange(std::move(endpoint)),
      legs_(legs),
      update_(std::move(update)),
      marked_(ranks().count()),
      in_order_(ranks().count()) {
  if (ranks().is_owner(ranks().own())) own_.push_back(ranks().own());
}

Status ShardedExchange::begin() {
  if (ranks().peers().empty()) {
    GW_ASSIGN_OR_RETURN(bool finite, endpoint_.residuals().pay());
    return finite && update_ ? update_(endpoint_.bucket()) : Status();
  }
  if (legs_ != Legs::kPull && !own_.empty()) {
    pushes_.await(ranks().everyone(), rank());
  }
  if (legs_ != Legs::kPush) pulls_.await(ranks().owners(), rank());
  marked_.assign(marked_.size(), false);
  in_order_.begin();
  in_order_.put(rank(), {});  // it lies in the bucket
  non_finite_.reset();
  if (legs_ != Legs::kPull) return encode_pushes();
  return own_.empty() ? Status() : encode_pull();
}

Status ShardedExchange::encode_pushes() {
  // Each rank begins with the next one, so that no owner gets the pushes of all at once.
  std::vector<uint32_t> peers(ranks().peers().begin(), ranks().peers().end());
  std::rotate(peers.begin(), std::upper_bound(peers.begin(), peers.end(), rank()), peers.end());
  const auto send = [&](uint32_t peer) {
    if (!ranks().is_owner(peer)) return;
    endpoint_.send(peer, Direction::kPush, endpoint_.finish(peer, non_finite_));
  };
  // A step that will be skipped must not change any residual here, so all shards are checked.
  GW_ASSIGN_OR_RETURN(non_finite_,
                      endpoint_.encode(peers, endpoint_.to_check(ranks().everyone()), send));
  if (non_finite_) std::ranges::for_each(peers, send);
  if (!non_finite_) endpoint_.sample_error_norm();
  return {};
}

Status ShardedExchange::take(ReceivedPacket received) {
  GW_RETURN_IF_ERROR(endpoint_.check_step(received, done()));
  const uint32_t peer = received.peer;
  const bool push = received.is_push();
  if (received.shard != (push ? rank() : peer)) {
    return unexpected(name_of(peer) + " sent a packet of " + name_of(received.shard) + "'s shard");
  }
  if (!(push ? pushes_ : pulls_).take(peer)) {
    return unexpected(name_of(peer) + " sent its " +
                      direction_name(received.packet.header.direction) + " of this step twice");
  }
  if (push) return take_push(std::move(received));
  const Packet& packet = received.packet;
  if (packet.non_finite) {
    marked_[peer] = true;
    endpoint_.mark_non_finite(peer, *packet.non_finite);
  } else {
    GW_RETURN_IF_ERROR(endpoint_.decode(peer, packet, DecodeMode::kStore));
  }
  endpoint_.finish_values(peer);
  return {};
}

Status ShardedExchange::take_push(ReceivedPacket received) {
  const uint32_t peer = received.peer;
  if (received.packet.non_finite) {
    if (!non_finite_) non_finite_ = received.packet.non_finite;
    in_order_.put(peer, {});
  } else {
    in_order_.put(peer, std::move(received));
  }
  const std::vector<const Packet*> packets = in_order_.next();
  if (!packets.empty()) {
    ShardCodec::Next next;
    if (in_order_.all_taken()) {
      next = {.divisor = endpoint_.divisor(), .encode = legs_ == Legs::kPushAndPull && !update_};
    }
    GW_RETURN_IF_ERROR(endpoint_.decode(rank(), packets, DecodeMode::kAdd, next));
  }
  in_order_.drop();
  return pushes_.complete() ? end_pushes() : Status();
}

Status ShardedExchange::end_pushes() {
  if (legs_ == Legs::kPushAndPull) return encode_pull();
  if (non_finite_) endpoint_.mark_non_finite(rank(), *non_finite_);
  return {};
}

Status ShardedExchange::encode_pull() {
  std::span<const uint32_t> unchecked = endpoint_.to_check(own_);
  if (update_ && !non_finite_) {
    GW_ASSIGN_OR_RETURN(non_finite_, endpoint_.find_non_finite(std::exchange(unchecked, {})));
    if (!non_finite_) GW_RETURN_IF_ERROR(update_(endpoint_.bucket()));
  }
  if (!non_finite_) {
    GW_ASSIGN_OR_RETURN(non_finite_, endpoint_.encode(own_, unchecked));
  }
  const std::span<const std::byte> packet = endpoint_.finish(rank(), non_finite_);
  for (uint32_t peer : ranks().peers()) endpoint_.send(peer, Direction::kPull, packet);
  if (non_finite_) endpoint_.mark_non_finite(rank(), *non_finite_);
  endpoint_.finish_values(rank());
  return {};
}

void ShardedExchange::retract() {
  // An owner's pull contains the pushes that it averaged, so the owner puts back only its pull. A
  // rank puts back a push only if the owner's pull was a marker, or if there are no pulls.
  for (uint32_t owner : ranks().everyone()) {
    if (owner == rank() || marked_[owner] || legs_ == Legs::kPush) {
      endpoint_.put_back(owner);
    }
  }
}

namespace {

Result<std::unique_ptr<Exchange>> make(ExchangeSetup setup, const std::string& name, Legs legs) {
  GW_RETURN_IF_ERROR(check_rank(*setup.layout, setup.rank));
  GW_ASSIGN_OR_RETURN(Endpoint endpoint, Endpoint::create(setup, describe_exchange(setup, name)));
  return std::unique_ptr<Exchange>(std::make_unique<ShardedExchange>(
      std::move(endpoint), legs, std::move(setup.options.update)));
}

constexpr ExchangeLeg kLegs[] = {{Route::kToOwners, Direction::kPush},
                                 {Route::kFromOwners, Direction::kPull}};

constexpr ExchangeInfo kInfo = {
    .name = "sharded",
    .summary = "every rank averages a part of the bucket and sends it to the others",
    .source = "3LC, section 3: servers, co-located with the workers",
    .default_codec = kShardedCodec,
    .updates = true,
    .chooses_codecs = true,
    .has_single_legs = true,
    .legs = kLegs};

}  // namespace

const ExchangeEntry exchange_entries::sharded = {
    &kInfo, [](const ExchangeChoice&, ExchangeSetup& setup) {
      const char* name = setup.options.update ? "sharded, with updates" : "sharded";
      return make(std::move(setup), name, Legs::kPushAndPull);
    }};

Result<std::unique_ptr<Exchange>> make_reduce_scatter_exchange(ExchangeSetup setup) {
  return make(std::move(setup), "reduce-scatter", Legs::kPush);
}

Result<std::unique_ptr<Exchange>> make_allgather_exchange(ExchangeSetup setup) {
  return make(std::move(setup), "allgather", Legs::kPull);
}

}  // namespace gradwire
