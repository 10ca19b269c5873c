#include "codecs/terngrad/terngrad.h"

#include <algorithm>
#include <utility>

#include "base/endian.h"
#include "base/return_if_error.h"
#include "codecs/qsgd/qsgd.h"
#include "codecs/registry.h"
#include "codecs/trit_sums.h"
#include "exchange/steps/exchange_entry.h"
#include "exchange/steps/sharded.h"
#include "exchange/steps/timer.h"
#include "stages/element/float_bits.h"
#include "stages/levels/levels.h"

namespace gradwire {
namespace {

// One scale for all values, however many: the largest group size that param_b can hold.
constexpr uint32_t kWholeSegment = 4294967288;

// First all ranks agree on the largest scales (the max round); then the sharded exchange follows.
class TernGradExchange final : public ShardedExchange {
 public:
  TernGradExchange(Endpoint endpoint, SharedScales& shared, PacketWriter writer)
      : ShardedExchange(std::move(endpoint)),
        shared_(shared),
        round_(endpoint_.add_round()),
        writer_(std::move(writer)),
        scales_(shared.size()) {}

  std::vector<uint32_t> awaiting() const override {
    return arrivals_.complete() ? ShardedExchange::awaiting() : arrivals_.missing();
  }
  bool done() const override { return arrivals_.complete() && ShardedExchange::done(); }

 private:
  Status begin() override;
  Status take(ReceivedPacket received) override;
  // Measures this rank's scales and makes their packet, or the marker.
  Result<std::span<const std::byte>> scales_packet();
  Status take_scales(const ReceivedPacket& received);
  // Called when all scales have arrived.
  Status start_pushes();

  SharedScales& shared_;
  uint32_t round_;  // the max round's number, in a shard's place
  PacketWriter writer_;
  std::vector<std::byte> scales_;              // f32: this rank's, then the largest of all ranks'
  Arrivals arrivals_;                          // of scales
  FirstNonFinite non_finite_;                  // of the lowest rank that is not finite
  std::vector<ReceivedPacket> early_packets_;  // from ranks that had all scales before this rank
};

Status TernGradExchange::begin() {
  if (endpoint_.peers().empty()) return ShardedExchange::begin();
  arrivals_.await(endpoint_.everyone(), endpoint_.rank());
  early_packets_.clear();
  non_finite_.reset();
  GW_ASSIGN_OR_RETURN(std::span<const std::byte> packet, scales_packet());
  for (uint32_t peer : endpoint_.peers()) {
    endpoint_.send(peer, Direction::kPush, packet);
    endpoint_.stats().scale_bytes_sent += packet.size();
  }
  return {};
}

Result<std::span<const std::byte>> TernGradExchange::scales_packet() {
  const Timer timer(endpoint_.stats().encode_seconds);
  writer_.begin({.direction = Direction::kPush,
                 .source = static_cast<uint16_t>(endpoint_.rank()),
                 .step = endpoint_.step(),
                 .layout_digest = endpoint_.digest(round_)});
  GW_ASSIGN_OR_RETURN(bool finite, shared_.measure(scales_));
  if (!finite) {
    GW_ASSIGN_OR_RETURN(non_finite_, endpoint_.codec().find_non_finite(endpoint_.everyone()));
  }
  if (non_finite_) return writer_.finish_non_finite(*non_finite_);
  GW_RETURN_IF_ERROR(writer_.add_encoded([&](std::span<std::byte> payload) {
    std::ranges::copy(scales_, payload.begin());
    return Result<uint64_t>(scales_.size());
  }));
  return writer_.finish();
}

Status TernGradExchange::take(ReceivedPacket received) {
  GW_RETURN_IF_ERROR(endpoint_.check_step(received, done()));
  if (received.shard == round_) return take_scales(received);
  if (arrivals_.complete()) return ShardedExchange::take(std::move(received));
  received.keep();
  early_packets_.push_back(std::move(received));
  return {};
}

Status TernGradExchange::take_scales(const ReceivedPacket& received) {
  const std::string from = name_of(received.peer);
  if (!arrivals_.take(received.peer)) {
    return unexpected(from + " sent its scales of this step twice");
  }
  const Packet& packet = received.packet;
  if (packet.non_finite) {
    if (!non_finite_ || received.peer < non_finite_->rank) {
      non_finite_ = packet.non_finite;
      non_finite_->rank = received.peer;
    }
  } else {
    if (packet.frames.size() != 1 || packet.frames[0].payload.size() != scales_.size()) {
      return {StatusCode::kPeerMismatch, from + "'s scales are not those of the layout"};
    }
    for (uint64_t at = 0; at < scales_.size(); at += sizeof(float)) {
      const auto bits = load_le<uint32_t>(packet.frames[0].payload.data() + at);
      if (bits >= kNonFiniteBits) {
        return {StatusCode::kCorruptPayload, from + " sent a scale that is negative or not finite"};
      }
      store_le(scales_.data() + at, std::max(bits, load_le<uint32_t>(scales_.data() + at)));
    }
  }
  return arrivals_.complete() ? start_pushes() : Status();
}

Status TernGradExchange::start_pushes() {
  if (non_finite_) {
    for (uint32_t shard : endpoint_.everyone()) endpoint_.mark_non_finite(shard, *non_finite_);
  } else {
    {
      const Timer timer(endpoint_.stats().encode_seconds);
      GW_RETURN_IF_ERROR(shared_.share(scales_, endpoint_.step()));
    }
    GW_RETURN_IF_ERROR(ShardedExchange::begin());
  }
  for (ReceivedPacket& early : std::exchange(early_packets_, {})) {
    GW_RETURN_IF_ERROR(ShardedExchange::take(std::move(early)));
  }
  return {};
}

Status refuse(const Layout& layout, const Segment& segment, const std::string& why) {
  return {StatusCode::kInvalidArgument,
          "exchange terngrad: tensor '" + layout.tensors()[segment.tensor].name + "', push " +
              segment.push_codec->text() + ", pull " + segment.pull_codec->text() + ": " + why};
}

// The codec of the segment's pulls; kInvalidArgument if it can't carry sums of trits.
Result<std::shared_ptr<const Codec>> pull_codec(const Layout& layout, const Segment& segment) {
  if (segment.push_codec->residual_type() != ResidualType::kNone ||
      segment.pull_codec->residual_type() != ResidualType::kNone) {
    return refuse(layout, segment,
                  "no residual is kept, as the mean of the draws is the gradient; add ef=off");
  }
  const auto* parameters = parameters_of<TernGradParameters>(*segment.push_codec);
  if (parameters == nullptr) return segment.pull_codec;
  const std::string levels = std::to_string(layout.world_size());
  if (segment.pull_codec->text() == segment.push_codec->text()) {
    const uint32_t group = parameters->group_size == 0 ? kWholeSegment : parameters->group_size;
    return Codec::parse("qsgd:levels=" + levels + ",bucket=" + std::to_string(group));
  }
  const auto* pulled = parameters_of<QsgdParameters>(*segment.pull_codec);
  if (pulled == nullptr || pulled->levels != static_cast<int32_t>(layout.world_size()) ||
      !groups_fit({segment.n, parameters->group_size}, {segment.n, pulled->group_size})) {
    return refuse(layout, segment,
                  "sums of trits are pulled by the same codec or by qsgd with levels=" + levels +
                      " and groups that have one scale");
  }
  return segment.pull_codec;
}

Result<Layout> with_pulled_sums(const Layout& layout) {
  if (layout.world_size() > kLargestLevel) {
    return Status(StatusCode::kInvalidArgument,
                  "exchange terngrad: at most " + std::to_string(kLargestLevel) +
                      " ranks, as qsgd has so many levels for their sums; the layout has " +
                      std::to_string(layout.world_size()));
  }
  std::vector<std::shared_ptr<const Codec>> codecs;
  for (const Segment& segment : layout.segments()) {
    GW_ASSIGN_OR_RETURN(std::shared_ptr<const Codec> codec, pull_codec(layout, segment));
    codecs.push_back(codec);
  }
  return layout.with_pull_codecs(codecs);
}

Result<std::unique_ptr<Exchange>> make(const ExchangeChoice&, ExchangeSetup& setup) {
  GW_RETURN_IF_ERROR(check_rank(*setup.layout, setup.rank));
  GW_ASSIGN_OR_RETURN(Layout changed, with_pulled_sums(*setup.layout));
  setup.layout = std::make_shared<const Layout>(std::move(changed));
  GW_ASSIGN_OR_RETURN(Endpoint endpoint,
                      Endpoint::create(setup, describe_exchange(setup, "terngrad")));
  SharedScales* shared = endpoint.codec().share_scales();
  if (shared == nullptr) {
    return Status(StatusCode::kInvalidArgument,
                  "exchange terngrad adds trits in the memory of the host alone: buckets on a "
                  "device take exchange sharded, with codec terngrad");
  }
  GW_ASSIGN_OR_RETURN(std::shared_ptr<const Codec> raw, Codec::parse("raw"));
  GW_ASSIGN_OR_RETURN(PacketWriter writer,
                      PacketWriter::create({{raw, shared->size() / sizeof(float)}}));
  return std::unique_ptr<Exchange>(
      std::make_unique<TernGradExchange>(std::move(endpoint), *shared, std::move(writer)));
}

constexpr ExchangeInfo kInfo = {
    .name = "terngrad",
    .summary = "trits with scales that all ranks share; their sums are not decoded on their way",
    .source = "TernGrad, sections 3 and 4",
    .default_codec = "terngrad",
    .sums = false,
    .adds_trits = true,
    .always_skips_non_finite = true};

}  // namespace

const ExchangeEntry exchange_entries::terngrad = {&kInfo, make};

}  // namespace gradwire
