#include "exchange/steps/scale_round.h"

#include <algorithm>
#include <utility>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "exchange/steps/timer.h"
#include "stages/element/float_bits.h"

namespace gradwire {

Result<ScaleRound> ScaleRound::create(Endpoint& endpoint, const std::string& exchange) {
  ScaleRound round;
  round.shared_ = endpoint.codec().share_scales();
  if (round.shared_ == nullptr) {
    return Status(StatusCode::kInvalidArgument,
                  exchange + " adds trits in the memory of the host alone: buckets on a device " +
                      "take exchange sharded, with codec terngrad");
  }
  GW_ASSIGN_OR_RETURN(round.codec_, Codec::parse("raw"));
  round.number_ = endpoint.add_round(PacketWriter::max_size(round.frames(round.shared_->all())));
  round.scales_.resize(round.shared_->size());
  return round;
}

std::vector<PacketWriter::Segment> ScaleRound::frames(ScaleRange scales) const {
  return {{codec_, scales.size / sizeof(float)}};
}

Status ScaleRound::add_packet(ScaleRange scales) {
  GW_ASSIGN_OR_RETURN(PacketWriter writer, PacketWriter::create(frames(scales)));
  outgoing_.push_back({.scales = scales, .writer = std::move(writer)});
  return {};
}

void ScaleRound::begin(std::span<const uint32_t> ranks, uint32_t but) {
  arrivals_.await(ranks, but);
  std::ranges::fill(scales_, std::byte{0});
  non_finite_.reset();
}

Status ScaleRound::measure(Endpoint& endpoint) {
  bool finite = false;
  {
    const Timer timer(endpoint.stats().encode_seconds);
    GW_ASSIGN_OR_RETURN(finite, shared_->measure(scales_));
  }
  if (finite) return {};
  GW_ASSIGN_OR_RETURN(non_finite_, endpoint.find_non_finite(endpoint.ranks().everyone()));
  return {};
}

Status ScaleRound::take(const Endpoint& endpoint, const ReceivedPacket& received,
                        ScaleRange scales) {
  const std::string from = name_of(received.peer);
  if (!arrivals_.take(received.peer)) {
    return unexpected(from + " sent its scales of this step twice");
  }
  const Packet& packet = received.packet;
  if (packet.non_finite) {
    NonFiniteOrigin origin = *packet.non_finite;
    if (received.is_push() && endpoint.origins().leg_rank(origin) != received.peer) {
      origin.rank = endpoint.origins().outer_rank(received.peer);
    }
    if (!non_finite_ || origin.rank < non_finite_->rank) non_finite_ = origin;
    return {};
  }
  if (packet.frames.size() != 1 || packet.frames[0].payload.size() != scales.size) {
    return {StatusCode::kPeerMismatch, from + "'s scales are not those of the layout"};
  }
  std::byte* largest = scales_.data() + scales.begin;
  for (uint64_t at = 0; at < scales.size; at += sizeof(float)) {
    const auto bits = load_le<uint32_t>(packet.frames[0].payload.data() + at);
    if (bits >= kNonFiniteBits) {
      return {StatusCode::kCorruptPayload, from + " sent a scale that is negative or not finite"};
    }
    store_le(largest + at, std::max(bits, load_le<uint32_t>(largest + at)));
  }
  return {};
}

Result<std::span<const std::byte>> ScaleRound::packet(size_t i, Endpoint& endpoint,
                                                      Direction direction, uint64_t step) {
  PacketWriter& writer = outgoing_[i].writer;
  const ScaleRange scales = outgoing_[i].scales;
  writer.begin({.direction = direction,
                .source = static_cast<uint16_t>(endpoint.ranks().own()),
                .step = step,
                .layout_digest = endpoint.digest(number_)});
  if (non_finite_) return writer.finish_non_finite(*non_finite_);
  GW_RETURN_IF_ERROR(writer.add_encoded([&](std::span<std::byte> payload) {
    std::copy_n(scales_.data() + scales.begin, scales.size, payload.begin());
    return Result<uint64_t>(scales.size);
  }));
  return writer.finish();
}

Status ScaleRound::share(Endpoint& endpoint, uint64_t step) {
  const Timer timer(endpoint.stats().encode_seconds);
  return shared_->share(scales_, step);
}

}  // namespace gradwire
