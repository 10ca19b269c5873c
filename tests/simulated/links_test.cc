// The clock of the simulated network, on cases that can be computed by hand.

#include "engines/simulated/links.h"

#include <vector>

#include "gtest/gtest.h"

namespace gradwire {
namespace {

// 1000 bytes a second, no headers.
NetworkModel slow_links() {
  NetworkModel model;
  model.bits_per_second = 8000;
  model.turn_bytes = 100;
  model.header_bytes = 0;
  return model;
}

// Messages between ranks, and when each has come.
class Traffic {
 public:
  Traffic(const NetworkModel& model, uint32_t ranks) : links_(model, ranks, clock_) {}

  void send(double when, uint32_t source, uint32_t target, uint64_t bytes) {
    const size_t i = arrivals_.size();
    arrivals_.push_back(-1);
    clock_.at(when, [this, i, source, target, bytes] {
      links_.send(source, target, bytes, [this, i] { arrivals_[i] = clock_.now(); });
    });
  }
  // In the order of the calls of send.
  std::vector<double> run() {
    while (clock_.run_next()) {
    }
    return arrivals_;
  }

 private:
  EventClock clock_;
  Links links_;
  std::vector<double> arrivals_;
};

void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-9) << i;
}

TEST(EventClock, RunsActionsInTheOrderOfTimeAndThenOfTheirAddition) {
  EventClock clock;
  std::vector<int> order;
  clock.at(2, [&] { order.push_back(3); });
  clock.at(1, [&] {
    order.push_back(1);
    clock.at(1, [&] { order.push_back(2); });
  });
  clock.at(2, [&] { order.push_back(4); });
  while (clock.run_next()) {
  }
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 4}));
  EXPECT_EQ(clock.now(), 2);
}

TEST(Links, AMessageTakesItsBytesAndTheLatency) {
  NetworkModel model = slow_links();
  model.latency = 0.25;
  Traffic traffic(model, 2);
  traffic.send(1, 0, 1, 950);
  traffic.send(5, 1, 0, 0);
  expect_near(traffic.run(), {1 + 0.95 + 0.25, 5.25});
}

TEST(Links, EveryFrameHasHeaders) {
  NetworkModel model = slow_links();
  model.payload_bytes = 1448;
  model.header_bytes = 66;
  Traffic traffic(model, 2);
  traffic.send(0, 0, 1, 1448);
  traffic.send(10, 0, 1, 1449);
  traffic.send(20, 0, 1, 0);
  expect_near(traffic.run(), {1.514, 10 + 1.449 + 2 * 0.066, 20.066});
}

TEST(Links, BothDirectionsHaveTheWholeRate) {
  Traffic traffic(slow_links(), 2);
  traffic.send(0, 0, 1, 1000);
  traffic.send(0, 1, 0, 1000);
  expect_near(traffic.run(), {1, 1});
}

TEST(Links, ConnectionsOfASenderTakeTurns) {
  Traffic traffic(slow_links(), 3);
  traffic.send(0, 0, 1, 1000);
  traffic.send(0, 0, 2, 300);
  // Parts of 100 bytes: 1, 2, 1, 2, 1, 2, and then only 1.
  expect_near(traffic.run(), {1.3, 0.6});
}

TEST(Links, MessagesOfAConnectionKeepTheirOrder) {
  Traffic traffic(slow_links(), 2);
  traffic.send(0, 0, 1, 1000);
  traffic.send(0.01, 0, 1, 10);
  traffic.send(0.02, 0, 1, 10);
  traffic.send(3, 0, 1, 10);
  expect_near(traffic.run(), {1, 1.01, 1.02, 3.01});
}

TEST(Links, AReceiverSharesItsLinkAmongItsSenders) {
  Traffic traffic(slow_links(), 4);
  for (uint32_t source = 1; source < 4; ++source) traffic.send(0, source, 0, 1000);
  // The senders need a second each, the receiver three for all of them.
  const std::vector<double> arrivals = traffic.run();
  EXPECT_NEAR(arrivals[0], 2.8, 1e-9);
  EXPECT_NEAR(arrivals[1], 2.9, 1e-9);
  EXPECT_NEAR(arrivals[2], 3.0, 1e-9);
}

TEST(Links, AllToAllKeepsEveryLinkBusy) {
  constexpr uint32_t kRanks = 8;
  Traffic traffic(slow_links(), kRanks);
  for (uint32_t source = 0; source < kRanks; ++source) {
    for (uint32_t target = 0; target < kRanks; ++target) {
      if (source != target) traffic.send(0, source, target, 10'000);
    }
  }
  double last = 0;
  for (double arrival : traffic.run()) last = std::max(last, arrival);
  EXPECT_GE(last, 70.0 - 1e-9);
  EXPECT_LE(last, 71.5) << "at most a turn of each sender above the bound";
}

// As slow_links, with 300 bytes that pass at once: an empty bucket takes 0.3 s to fill.
NetworkModel links_with_burst() {
  NetworkModel model = slow_links();
  model.burst_bytes = 300;
  return model;
}

TEST(Links, AnIdleLinkPassesItsBurstAtOnce) {
  Traffic traffic(links_with_burst(), 2);
  traffic.send(1, 0, 1, 300);
  traffic.send(2, 0, 1, 250);
  // Both ends have a bucket, but the bytes beyond 300 leave the sender at its rate.
  traffic.send(3, 0, 1, 301);
  traffic.send(4, 0, 1, 1000);
  expect_near(traffic.run(), {1, 2, 3.001, 4.7});
}

TEST(Links, TheBurstCountsHeadersAndIsNotFasterThanTheLatency) {
  NetworkModel model = links_with_burst();
  model.latency = 0.25;
  model.header_bytes = 66;
  Traffic traffic(model, 2);
  traffic.send(1, 0, 1, 234);
  traffic.send(2, 0, 1, 334);
  expect_near(traffic.run(), {1.25, 2.35});
}

TEST(Links, ABucketFillsWhileTheLinkIsIdle) {
  Traffic traffic(links_with_burst(), 2);
  traffic.send(1, 0, 1, 300);     // leaves 0
  traffic.send(1.1, 0, 1, 300);   // 100 at once, 200 in 0.2 s
  traffic.send(1.35, 0, 1, 200);  // idle for 0.05 s
  traffic.send(1.6, 0, 1, 30);    // 100 are there, which leaves 70
  traffic.send(1.61, 0, 1, 100);  // 80 at once
  traffic.send(9, 0, 1, 400);     // never more than 300
  expect_near(traffic.run(), {1, 1.3, 1.5, 1.6, 1.63, 9.1});
}

TEST(Links, ALongMessageHasTheRateOfTheLink) {
  Traffic traffic(links_with_burst(), 2);
  traffic.send(0, 0, 1, 100'000);
  traffic.send(0, 0, 1, 50);
  expect_near(traffic.run(), {99.7, 99.75});
}

TEST(Links, EachDirectionHasABucket) {
  Traffic traffic(links_with_burst(), 2);
  traffic.send(1, 0, 1, 300);
  traffic.send(1, 1, 0, 300);
  expect_near(traffic.run(), {1, 1});
}

TEST(Links, AReceiverHasABucketForAllOfItsSenders) {
  Traffic traffic(links_with_burst(), 4);
  // The senders pass everything at once, in turns; the receiver 300 of 900 bytes.
  for (uint32_t source = 1; source < 4; ++source) traffic.send(0, source, 0, 300);
  traffic.send(1, 1, 0, 300);
  traffic.send(1.1, 2, 0, 300);
  expect_near(traffic.run(), {0.4, 0.5, 0.6, 1, 1.3});
}

TEST(Links, AReceiverWithoutTokensTakesABurstAtItsRate) {
  NetworkModel model = links_with_burst();
  model.latency = 0.5;
  Traffic traffic(model, 3);
  traffic.send(0, 0, 2, 500);  // has come at 0.7, and the bucket of 2 is empty then
  traffic.send(0.3, 1, 2, 300);
  // The first sends at its rate until 0.2, so the bucket of 2 is empty from 0.5 to 0.7 and has 100
  // at 0.8.
  expect_near(traffic.run(), {0.7, 1.0});
}

TEST(Links, AReceiverThatTakesTheWholeRateHasNoTokensLeft) {
  Traffic traffic(links_with_burst(), 3);
  traffic.send(0, 0, 2, 1000);   // at the rate from 0 to 0.7
  traffic.send(0.7, 0, 2, 100);  // and to 0.8
  traffic.send(0.8, 1, 2, 100);  // the sender has tokens, the receiver has none
  expect_near(traffic.run(), {0.7, 0.8, 0.9});
}

TEST(Links, RanksOfAMachineShareItsBurst) {
  NetworkModel model = links_with_burst();
  model.ranks_per_machine = 2;
  Traffic traffic(model, 4);
  traffic.send(1, 0, 2, 300);
  traffic.send(1, 1, 3, 300);
  traffic.send(5, 0, 1, 1'000'000);  // local: no limit, and no tokens
  traffic.send(5, 0, 2, 300);
  expect_near(traffic.run(), {1.2, 1.3, 5, 5});
}

TEST(Links, UnlimitedLinksNeedNoBurst) {
  NetworkModel model;
  model.burst_bytes = 300;
  Traffic traffic(model, 2);
  traffic.send(1, 0, 1, 1'000'000);
  expect_near(traffic.run(), {1});
}

TEST(Links, RanksOfAMachineShareItsLink) {
  NetworkModel model = slow_links();
  model.ranks_per_machine = 2;
  Traffic traffic(model, 4);
  traffic.send(0, 0, 2, 1000);
  traffic.send(0, 1, 3, 1000);
  expect_near(traffic.run(), {1.9, 2});
}

TEST(Links, LocalMessagesTakeNoPartOfTheLink) {
  NetworkModel model = slow_links();
  model.ranks_per_machine = 2;
  model.latency = 0.5;
  model.local_bits_per_second = 80'000;
  model.header_bytes = 66;
  Traffic traffic(model, 4);
  traffic.send(0, 0, 1, 1000);
  traffic.send(0, 0, 2, 934);
  expect_near(traffic.run(), {0.1, 1.5});
}

TEST(Links, UnlimitedLinksTakeNoTime) {
  Traffic traffic(NetworkModel(), 2);
  traffic.send(1, 0, 1, 1'000'000);
  expect_near(traffic.run(), {1});
}

}  // namespace
}  // namespace gradwire
