// A model whose parts have exchanges of their own, each with the one server that owns it.

#include <map>

#include "gtest/gtest.h"

#include "frame/packet.h"
#include "tests/exchange/server_cluster.h"

namespace gradwire {
namespace {

constexpr uint32_t kWorkers = 2;
constexpr uint32_t kServers = 2;

// The deltas that worker 0 applied in three versions, and the payloads of both directions, of each
// tensor of `layout`, whose values begin at `first` of the model's.
void train(const std::shared_ptr<const Layout>& layout, uint64_t first,
           std::map<std::string, std::vector<std::byte>>& payloads, std::vector<float>& deltas) {
  const auto note = [&](uint32_t owner, std::span<const std::byte> message) {
    const Packet packet = parse_packet(message).value();
    size_t frame = 0;
    for (const Segment& s : layout->segments()) {
      if (s.owner != owner) continue;
      const auto payload = packet.frames.at(frame++).payload;
      auto& all = payloads[layout->tensors()[s.tensor].name];
      all.insert(all.end(), payload.begin(), payload.end());
    }
  };
  std::vector<std::unique_ptr<WorkerSide>> workers;
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    const auto apply = [&, rank](uint32_t server, uint64_t, std::span<const float> delta) {
      for (const Segment& s : layout->segments()) {
        if (s.owner != server || rank > 0) continue;
        for (uint64_t i = s.bucket_offset; i < s.bucket_offset + s.n; ++i) {
          deltas[first + i] += delta[i];
        }
      }
      return Status();
    };
    workers.push_back(
        make_server_worker(layout, rank, Execution::create().value(), {}, apply).value());
  }
  std::map<uint32_t, std::unique_ptr<ServerSide>> servers;
  for (uint32_t rank : workers[0]->listening()) {
    servers[rank] = make_server(layout, rank, Execution::create().value(), {}, {}).value();
  }
  const uint64_t all = first + layout->numel();
  for (uint64_t version = 0; version < 3; ++version) {
    std::vector<float> bucket(layout->numel());
    for (auto& [rank, server] : servers) ASSERT_TRUE(server->start(bucket, version).ok());
    Buckets gradients;
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      // The model's first values do not depend on how many follow.
      const std::vector<float> model = random_buckets(1, all, 10 * version + rank)[0];
      gradients.emplace_back(model.begin() + static_cast<ptrdiff_t>(first), model.end());
    }
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      ASSERT_TRUE(workers[rank]->start(gradients[rank], version).ok());
      for (const OutgoingMessage& message : workers[rank]->take_outgoing()) {
        note(message.peer, message.bytes);
        ASSERT_TRUE(servers.at(message.peer)->receive(rank, message.bytes).ok());
      }
    }
    for (auto& [server, side] : servers) {
      for (const OutgoingMessage& message : side->take_outgoing()) {
        if (message.peer == 0) note(server, message.bytes);
        ASSERT_TRUE(workers[message.peer]->receive(server, message.bytes).ok());
      }
    }
    for (auto& worker : workers) ASSERT_TRUE(worker->done());
  }
}

TEST(ServerParts, EachPartAloneHasThePayloadsAndDeltasOfTheWhole) {
  for (const char* codec : {"raw", "3lc:s=1.75,coder=rice", "qsgd", "terngrad"}) {
    const LayoutOptions options{.codec = codec, .servers = kServers};
    const auto whole = std::make_shared<const Layout>(
        Layout::create(server_tensors(), kWorkers + kServers, options).value());
    std::map<std::string, std::vector<std::byte>> payloads;
    std::map<std::string, std::vector<std::byte>> payloads_of_parts;
    std::vector<float> deltas(whole->numel());
    std::vector<float> deltas_of_parts(whole->numel());
    ASSERT_NO_FATAL_FAILURE(train(whole, 0, payloads, deltas));
    for (const Segment& s : whole->segments()) {
      LayoutOptions own = options;
      own.owner = s.owner;
      const auto part = std::make_shared<const Layout>(
          Layout::create({whole->tensors()[s.tensor]}, kWorkers + kServers, own).value());
      ASSERT_NO_FATAL_FAILURE(train(part, s.bucket_offset, payloads_of_parts, deltas_of_parts));
    }
    EXPECT_EQ(payloads, payloads_of_parts) << codec;
    EXPECT_TRUE(same_bits(deltas, deltas_of_parts)) << codec;
  }
}

TEST(ServerParts, TheOtherServersTakeNoPart) {
  const auto layout = std::make_shared<const Layout>(
      Layout::create({{"w", {30, 10}}}, 4, {.servers = 2, .owner = 3}).value());
  const auto worker = make_server_worker(layout, 0, Execution::create().value(), {}, {}).value();
  EXPECT_EQ(worker->listening(), std::vector<uint32_t>{3});
  std::vector<float> gradient(300, 1.0f);
  ASSERT_TRUE(worker->start(gradient, 0).ok());
  EXPECT_EQ(worker->awaiting(), std::vector<uint32_t>{3});
  EXPECT_EQ(worker->set_version(2, 0).code(), StatusCode::kInvalidArgument);
  const Status other = make_server(layout, 2, Execution::create().value(), {}, {}).status();
  EXPECT_EQ(other.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(other.message(), "rank 2 is no server; those are ranks 3 to 3");
  const Status status = Layout::create({{"w", {30}}}, 4, {.servers = 2, .owner = 1}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "owner: rank 1 is a worker; ranks 2 to 3 are servers");
}

}  // namespace
}  // namespace gradwire
