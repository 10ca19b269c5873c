// Four ranks in one process average a bucket; over a network, each rank has one exchange and sends
// its messages to the others.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include <gradwire/exchange.h>
#include <gradwire/execution.h>
#include <gradwire/layout.h>

using namespace gradwire;

namespace {

constexpr uint32_t kRanks = 4;

int fail(const Status& status) {
  std::fprintf(stderr, "gradwire: %s\n", status.message().c_str());
  return 1;
}

}  // namespace

int main() {
  Result<Layout> made = Layout::create({{"weight", {64, 100}}}, kRanks, {.codec = "int8"});
  if (!made.ok()) return fail(made.status());
  const auto layout = std::make_shared<const Layout>(std::move(made).value());

  std::vector<std::unique_ptr<Exchange>> exchanges;
  std::vector<std::vector<float>> buckets;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    Result<Execution> execution = Execution::create();
    if (!execution.ok()) return fail(execution.status());
    auto exchange = make_exchange("ring", layout, rank, std::move(execution).value());
    if (!exchange.ok()) return fail(exchange.status());
    exchanges.push_back(std::move(exchange).value());
    std::vector<float>& bucket = buckets.emplace_back(layout->numel());
    for (size_t i = 0; i < bucket.size(); ++i) bucket[i] = float(i + 1) * float(rank + 1);
  }

  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    if (Status status = exchanges[rank]->start(buckets[rank], 0); !status.ok()) return fail(status);
  }
  for (bool sent = true; sent;) {
    sent = false;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      for (const OutgoingMessage& message : exchanges[rank]->take_outgoing()) {
        Status status = exchanges[message.peer]->receive(rank, message.bytes);
        if (!status.ok()) return fail(status);
        sent = true;
      }
    }
  }
  std::printf("the mean of 1000, 2000, 3000 and 4000 is about %.0f on every rank\n",
              double{buckets[3][999]});
  return buckets[0] == buckets[3] ? 0 : 1;
}
