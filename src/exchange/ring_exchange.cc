#include <algorithm>
#include <utility>

#include "base/return_if_error.h"
#include "exchange/packet_exchange.h"
#include "exchange/timer.h"

namespace gradwire {
namespace {

// Shard k goes from rank k + 1 around to rank k and is summed on its way, then from rank k around
// to rank k - 1. The shards' ways don't depend on each other, so their messages may come in any
// order: which shard a packet holds is told by its digest.
class RingExchange final : public PacketExchange {
 public:
  RingExchange(std::shared_ptr<const Layout> layout, uint32_t rank, Execution execution,
               uint64_t seed, Reduction reduction)
      : PacketExchange(std::move(layout), rank, std::move(execution), seed, reduction),
        push_arrivals_(world_size()),
        pull_arrivals_(world_size()),
        broken_at_(world_size()),
        passed_on_(world_size()) {}

  using PacketExchange::prepare;

  bool done() const override { return messages_missing_ == 0; }
  std::vector<uint32_t> awaiting() const override;
  Status receive(uint32_t peer, std::span<const std::byte> message) override;
  void retract() override;

 protected:
  std::string name() const override { return "ring"; }
  Status begin_step() override;

 private:
  [[nodiscard]] uint32_t left() const { return (rank() + world_size() - 1) % world_size(); }
  [[nodiscard]] uint32_t right() const { return (rank() + 1) % world_size(); }
  Status take_push(uint32_t shard, const Packet& packet);
  Status take_pull(uint32_t shard, const Packet& packet, std::span<const std::byte> message);
  // Encodes what is summed up so far for the next rank, or tells it why there is nothing.
  Status send_sum(uint32_t shard, std::optional<NonFiniteOrigin> poison);
  Status send_average(std::optional<NonFiniteOrigin> poison);

  uint32_t messages_missing_ = 0;
  std::vector<Arrival> push_arrivals_;  // of each shard
  std::vector<Arrival> pull_arrivals_;
  std::optional<NonFiniteOrigin> poison_;           // this rank's own
  std::vector<std::optional<uint32_t>> broken_at_;  // the rank where each shard's sum ended
  std::vector<std::vector<std::byte>> passed_on_;   // each shard's pull
};

std::vector<uint32_t> RingExchange::awaiting() const {
  if (done()) return {};
  return {left()};
}

Status RingExchange::begin_step() {
  if (world_size() == 1) {
    pay_residuals();
    return {};
  }
  messages_missing_ = 2 * (world_size() - 1);
  std::fill(push_arrivals_.begin(), push_arrivals_.end(), Arrival::kMissing);
  std::fill(pull_arrivals_.begin(), pull_arrivals_.end(), Arrival::kMissing);
  std::fill(broken_at_.begin(), broken_at_.end(), std::nullopt);
  poison_.reset();
  // Looked at first, as a whole: a step that will be skipped must not touch any residual here.
  if (keeps_residuals()) {
    const Timer timer(counted().encode_seconds);
    for (uint32_t shard = 0; shard < world_size() && !poison_; ++shard) {
      poison_ = find_non_finite(shard);
    }
  }
  GW_RETURN_IF_ERROR(send_sum(left(), std::nullopt));
  sample_error_norm();
  return {};
}

Status RingExchange::receive(uint32_t peer, std::span<const std::byte> message) {
  Result<Packet> parsed = parse_packet(message);
  if (!parsed.ok()) {
    return {parsed.status().code(),
            "message from rank " + std::to_string(peer) + ": " + parsed.status().message()};
  }
  const Packet& packet = parsed.value();
  Result<uint32_t> found = shard_of(peer, packet);
  if (!found.ok()) return found.status();
  const uint32_t shard = found.value();
  const bool push = packet.header.role == PacketRole::kPush;
  // A shard's sum begins at the rank behind its owner, and its average ends in front of it.
  if (peer != left() || shard == (push ? left() : rank())) {
    return unexpected("rank " + std::to_string(peer) + " sent the " + (push ? "sum" : "average") +
                      " of shard " + std::to_string(shard) + " to rank " + std::to_string(rank()));
  }
  Arrival& arrival = (push ? push_arrivals_ : pull_arrivals_)[shard];
  if (arrival == Arrival::kHere) {
    return unexpected("rank " + std::to_string(peer) + " sent the " + (push ? "sum" : "average") +
                      " of shard " + std::to_string(shard) + " twice");
  }
  arrival = Arrival::kHere;
  --messages_missing_;
  (push ? counted().push_bytes_received : counted().pull_bytes_received) += message.size();
  return push ? take_push(shard, packet) : take_pull(shard, packet, message);
}

Status RingExchange::take_push(uint32_t shard, const Packet& packet) {
  if (!packet.non_finite) GW_RETURN_IF_ERROR(decode(shard, packet, DecodeMode::kAdd));
  return shard == rank() ? send_average(packet.non_finite) : send_sum(shard, packet.non_finite);
}

Status RingExchange::send_sum(uint32_t shard, std::optional<NonFiniteOrigin> poison) {
  if (!poison) poison = poison_;
  if (!poison && keeps_residuals()) poison = find_non_finite(shard);
  if (!poison) {
    Result<std::optional<NonFiniteOrigin>> origin = encode(shard);
    if (!origin.ok()) return origin.status();
    poison = origin.value();
  }
  send(right(), PacketRole::kPush, finish(shard, poison));
  return {};
}

Status RingExchange::send_average(std::optional<NonFiniteOrigin> poison) {
  finish_sum(rank());
  if (!poison) poison = poison_;
  if (!poison && keeps_residuals()) poison = find_non_finite(rank());
  if (!poison) {
    Result<std::optional<NonFiniteOrigin>> origin = encode(rank());
    if (!origin.ok()) return origin.status();
    poison = origin.value();
  }
  send(right(), PacketRole::kPull, finish(rank(), poison));
  if (!poison) return decode_own(rank());
  broken_at_[rank()] = poison->rank;
  void_shard(rank(), *poison);
  return {};
}

Status RingExchange::take_pull(uint32_t shard, const Packet& packet,
                               std::span<const std::byte> message) {
  if (right() != shard) {
    passed_on_[shard].assign(message.begin(), message.end());
    send(right(), PacketRole::kPull, passed_on_[shard]);
  }
  if (!packet.non_finite) return decode(shard, packet, DecodeMode::kStore);
  broken_at_[shard] = packet.non_finite->rank;
  void_shard(shard, *packet.non_finite);
  return {};
}

void RingExchange::retract() {
  for (uint32_t shard = 0; shard < world_size(); ++shard) {
    // What a rank took up of the sum before it is in its own sum, and comes back with that. So the
    // last one of an unbroken part of the way takes back: the owner, or whoever sent to where the
    // sum ended.
    const bool last = broken_at_[shard] ? *broken_at_[shard] == right() : shard == rank();
    if (last) put_back(shard);
  }
}

}  // namespace

Result<std::unique_ptr<Exchange>> make_ring_exchange(std::shared_ptr<const Layout> layout,
                                                     uint32_t rank, Execution execution,
                                                     uint64_t seed, Reduction reduction) {
  GW_RETURN_IF_ERROR(check_rank(*layout, rank));
  auto exchange = std::make_unique<RingExchange>(std::move(layout), rank, std::move(execution),
                                                 seed, reduction);
  GW_RETURN_IF_ERROR(exchange->prepare());
  return std::unique_ptr<Exchange>(std::move(exchange));
}

}  // namespace gradwire
