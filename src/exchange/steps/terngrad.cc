#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/return_if_error.h"
#include "exchange/steps/exchange_entry.h"
#include "exchange/steps/pulled_sums.h"
#include "exchange/steps/scale_round.h"
#include "exchange/steps/sharded.h"

namespace gradwire {
namespace {

// First all ranks agree on the largest scales (the max round); then the sharded exchange follows.
class TernGradExchange final : public ShardedExchange {
 public:
  TernGradExchange(Endpoint endpoint, ScaleRound scales)
      : ShardedExchange(std::move(endpoint)), scales_(std::move(scales)) {}

  std::vector<uint32_t> awaiting() const override {
    return scales_.complete() ? ShardedExchange::awaiting() : scales_.missing();
  }
  bool done() const override { return scales_.complete() && ShardedExchange::done(); }

 private:
  Status begin() override;
  Status take(ReceivedPacket received) override;
  // Called when all scales have arrived.
  Status start_pushes();

  ScaleRound scales_;
  std::vector<ReceivedPacket> early_packets_;  // from ranks that had all scales before this rank
};

Status TernGradExchange::begin() {
  if (ranks().peers().empty()) return ShardedExchange::begin();
  scales_.begin(ranks().everyone(), rank());
  early_packets_.clear();
  GW_RETURN_IF_ERROR(scales_.measure(endpoint_));
  GW_ASSIGN_OR_RETURN(std::span<const std::byte> packet,
                      scales_.packet(0, endpoint_, Direction::kPush, endpoint_.step()));
  for (uint32_t peer : ranks().peers()) endpoint_.send_scales(peer, Direction::kPush, packet);
  return {};
}

Status TernGradExchange::take(ReceivedPacket received) {
  GW_RETURN_IF_ERROR(endpoint_.check_step(received, done()));
  if (received.shard == scales_.number()) {
    GW_RETURN_IF_ERROR(scales_.take(endpoint_, received, scales_.shared().all()));
    return scales_.complete() ? start_pushes() : Status();
  }
  if (scales_.complete()) return ShardedExchange::take(std::move(received));
  received.keep();
  early_packets_.push_back(std::move(received));
  return {};
}

Status TernGradExchange::start_pushes() {
  if (scales_.non_finite()) {
    for (uint32_t shard : ranks().everyone()) {
      endpoint_.mark_non_finite(shard, *scales_.non_finite());
    }
  } else {
    GW_RETURN_IF_ERROR(scales_.share(endpoint_, endpoint_.step()));
    GW_RETURN_IF_ERROR(ShardedExchange::begin());
  }
  for (ReceivedPacket& early : std::exchange(early_packets_, {})) {
    GW_RETURN_IF_ERROR(ShardedExchange::take(std::move(early)));
  }
  return {};
}

Result<std::unique_ptr<Exchange>> make(const ExchangeChoice&, ExchangeSetup& setup) {
  const std::string name = "exchange terngrad";
  GW_RETURN_IF_ERROR(check_rank(*setup.layout, setup.rank));
  for (const Segment& segment : setup.layout->segments()) {
    GW_RETURN_IF_ERROR(check_keeps_no_residual(name, *setup.layout, segment));
  }
  GW_ASSIGN_OR_RETURN(Layout changed, with_pulled_sums(name, *setup.layout));
  setup.layout = std::make_shared<const Layout>(std::move(changed));
  GW_ASSIGN_OR_RETURN(Endpoint endpoint,
                      Endpoint::create(setup, describe_exchange(setup, "terngrad")));
  GW_ASSIGN_OR_RETURN(ScaleRound scales, ScaleRound::create(endpoint, name));
  GW_RETURN_IF_ERROR(scales.add_packet(scales.shared().all()));
  return std::unique_ptr<Exchange>(
      std::make_unique<TernGradExchange>(std::move(endpoint), std::move(scales)));
}

constexpr ExchangeLeg kLegs[] = {{Route::kToOwners, Direction::kPush},
                                 {Route::kFromOwners, Direction::kPull}};
constexpr ExchangeLeg kScaleLegs[] = {{Route::kToAll, Direction::kPush}};

constexpr ExchangeInfo kInfo = {
    .name = "terngrad",
    .summary = "trits with scales that all ranks share; their sums are not decoded on their way",
    .source = "TernGrad, sections 3 and 4",
    .default_codec = "terngrad",
    .sums = false,
    .adds_trits = true,
    .always_skips_non_finite = true,
    .legs = kLegs,
    .scale_legs = kScaleLegs};

}  // namespace

const ExchangeEntry exchange_entries::terngrad = {&kInfo, make};

}  // namespace gradwire
