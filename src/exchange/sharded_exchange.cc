#include "exchange/sharded_exchange.h"

#include <algorithm>

#include "base/return_if_error.h"
#include "exchange/timer.h"

namespace gradwire {

std::vector<uint32_t> ShardedExchange::awaiting() const {
  const std::vector<Arrival>& arrivals = pushes_missing_ > 0 ? push_arrivals_ : pull_arrivals_;
  std::vector<uint32_t> peers;
  if (done()) return peers;
  for (uint32_t peer = 0; peer < world_size(); ++peer) {
    if (peer != rank() && arrivals[peer] == Arrival::kMissing) peers.push_back(peer);
  }
  return peers;
}

Status ShardedExchange::begin_step() {
  if (world_size() == 1) {
    const bool finite = pay_residuals();
    return finite && update_ ? update_(bucket()) : Status();
  }
  pushes_missing_ = legs_ == Legs::kPull ? 0 : world_size() - 1;
  pulls_missing_ = legs_ == Legs::kPush ? 0 : world_size() - 1;
  std::fill(push_arrivals_.begin(), push_arrivals_.end(), Arrival::kMissing);
  std::fill(pull_arrivals_.begin(), pull_arrivals_.end(), Arrival::kMissing);
  std::fill(voided_.begin(), voided_.end(), false);
  next_push_ = rank() == 0 ? 1 : 0;
  poison_.reset();
  return legs_ == Legs::kPull ? encode_pull() : encode_pushes();
}

Status ShardedExchange::encode_pushes() {
  // Looked at first, as a whole: a step that will be skipped must not touch any residual here.
  if (keeps_residuals()) {
    const Timer timer(counted().encode_seconds);
    for (uint32_t owner = 0; owner < world_size() && !poison_; ++owner) {
      poison_ = find_non_finite(owner);
    }
  }
  for (uint32_t owner = 0; owner < world_size() && !poison_; ++owner) {
    if (owner == rank()) continue;
    Result<std::optional<NonFiniteOrigin>> origin = encode(owner);
    if (!origin.ok()) return origin.status();
    poison_ = origin.value();
    if (!poison_) continue;
    for (uint32_t earlier = 0; earlier < owner; ++earlier) {
      if (earlier != rank()) put_back(earlier);
    }
  }
  for (uint32_t peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) send(peer, PacketRole::kPush, finish(peer, poison_));
  }
  if (!poison_) sample_error_norm();
  return {};
}

Status ShardedExchange::receive(uint32_t peer, std::span<const std::byte> message) {
  Result<Packet> parsed = parse_packet(message);
  if (!parsed.ok()) {
    return {parsed.status().code(),
            "message from rank " + std::to_string(peer) + ": " + parsed.status().message()};
  }
  const Packet& packet = parsed.value();
  Result<uint32_t> shard = shard_of(peer, packet);
  if (!shard.ok()) return shard.status();
  const bool push = packet.header.role == PacketRole::kPush;
  if (shard.value() != (push ? rank() : peer)) {
    return unexpected("rank " + std::to_string(peer) + " sent a packet of rank " +
                      std::to_string(shard.value()) + "'s shard");
  }
  Arrival& arrival = (push ? push_arrivals_ : pull_arrivals_)[peer];
  if (arrival == Arrival::kHere) {
    return unexpected("rank " + std::to_string(peer) + " sent its " + (push ? "push" : "pull") +
                      " of this step twice");
  }
  arrival = Arrival::kHere;
  if (push) {
    counted().push_bytes_received += message.size();
    return take_push(peer, packet, message);
  }
  counted().pull_bytes_received += message.size();
  --pulls_missing_;
  if (!packet.non_finite) return decode(peer, packet, DecodeMode::kStore);
  voided_[peer] = true;
  void_shard(peer, *packet.non_finite);
  return {};
}

Status ShardedExchange::take_push(uint32_t peer, const Packet& packet,
                                  std::span<const std::byte> message) {
  --pushes_missing_;
  if (packet.non_finite) {
    if (!poison_) poison_ = packet.non_finite;
  } else if (peer == next_push_) {
    GW_RETURN_IF_ERROR(decode(rank(), packet, DecodeMode::kAdd));
  } else {
    early_pushes_[peer].assign(message.begin(), message.end());
  }
  GW_RETURN_IF_ERROR(add_pushes_in_order());
  return pushes_missing_ == 0 ? end_pushes() : Status();
}

// Moves next_push_ over all ranks whose pushes are here, adding those that had come early.
Status ShardedExchange::add_pushes_in_order() {
  while (next_push_ < world_size() &&
         (next_push_ == rank() || push_arrivals_[next_push_] == Arrival::kHere)) {
    std::vector<std::byte>& early = early_pushes_[next_push_];
    if (!early.empty()) {
      GW_RETURN_IF_ERROR(decode(rank(), parse_packet(early).value(), DecodeMode::kAdd));
      early.clear();
    }
    ++next_push_;
  }
  return {};
}

Status ShardedExchange::end_pushes() {
  finish_sum(rank());
  if (legs_ == Legs::kPushAndPull) return encode_pull();
  if (poison_) void_shard(rank(), *poison_);
  return {};
}

Status ShardedExchange::encode_pull() {
  if (!poison_ && keeps_residuals()) poison_ = find_non_finite(rank());
  if (!poison_ && update_) GW_RETURN_IF_ERROR(update_(bucket()));
  if (!poison_) {
    Result<std::optional<NonFiniteOrigin>> origin = encode(rank());
    if (!origin.ok()) return origin.status();
    poison_ = origin.value();
  }
  const std::span<const std::byte> packet = finish(rank(), poison_);
  for (uint32_t peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) send(peer, PacketRole::kPull, packet);
  }
  if (!poison_) return decode_own(rank());
  void_shard(rank(), *poison_);
  return {};
}

void ShardedExchange::retract() {
  // What an owner took up of a push is in its average, and comes back with the pull it took back,
  // where there is one.
  for (uint32_t owner = 0; owner < world_size(); ++owner) {
    if (owner == rank() || voided_[owner] || legs_ == Legs::kPush) put_back(owner);
  }
}

namespace {

Result<std::unique_ptr<Exchange>> make(std::shared_ptr<const Layout> layout, uint32_t rank,
                                       Execution execution, uint64_t seed, Legs legs,
                                       Reduction reduction, ShardUpdate update = {}) {
  GW_RETURN_IF_ERROR(check_rank(*layout, rank));
  auto exchange = std::make_unique<ShardedExchange>(std::move(layout), rank, std::move(execution),
                                                    seed, legs, reduction, std::move(update));
  GW_RETURN_IF_ERROR(exchange->prepare());
  return std::unique_ptr<Exchange>(std::move(exchange));
}

}  // namespace

Result<std::unique_ptr<Exchange>> make_sharded_exchange(std::shared_ptr<const Layout> layout,
                                                        uint32_t rank, Execution execution,
                                                        uint64_t seed, ShardUpdate update,
                                                        Reduction reduction) {
  return make(std::move(layout), rank, std::move(execution), seed, Legs::kPushAndPull, reduction,
              std::move(update));
}

Result<std::unique_ptr<Exchange>> make_reduce_scatter_exchange(std::shared_ptr<const Layout> layout,
                                                               uint32_t rank, Execution execution,
                                                               uint64_t seed, Reduction reduction) {
  return make(std::move(layout), rank, std::move(execution), seed, Legs::kPush, reduction);
}

Result<std::unique_ptr<Exchange>> make_allgather_exchange(std::shared_ptr<const Layout> layout,
                                                          uint32_t rank, Execution execution,
                                                          uint64_t seed) {
  return make(std::move(layout), rank, std::move(execution), seed, Legs::kPull,
              Reduction::kAverage);
}

}  // namespace gradwire
