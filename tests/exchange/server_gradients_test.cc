// Dedicated servers that average gradients and have no model (TernGrad, figure 1): scales that all
// workers share, and sums of trits that are pulled exactly.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "gtest/gtest.h"

#include "frame/packet.h"
#include "stages/levels/levels.h"
#include "tests/exchange/server_cluster.h"
#include "tests/exchange/terngrad_ranks.h"

namespace gradwire {
namespace {

constexpr ServerOptions kGradients = {.pulls = ServerOptions::Pulls::kGradients};

struct Sent {
  uint32_t source;
  uint32_t target;
  Packet packet;
  std::vector<std::byte> bytes;
};

// Workers and servers whose workers keep what they pulled last.
class Averaging {
 public:
  Averaging(uint32_t workers, uint32_t servers, LayoutOptions options,
            std::vector<TensorInfo> tensors = server_tensors())
      : workers_(workers) {
    options.servers = servers;
    layout_ = std::make_shared<const Layout>(
        Layout::create(std::move(tensors), workers + servers, options).value());
    pulled_.assign(workers, std::vector<float>(layout_->numel()));
    applied_.resize(workers);
    for (uint32_t rank = 0; rank < workers; ++rank) {
      const auto apply = [this, rank](uint32_t server, uint64_t, std::span<const float> average) {
        ++applied_[rank];
        for (const Segment& s : layout_->segments()) {
          if (s.owner != server) continue;
          std::copy_n(average.begin() + static_cast<ptrdiff_t>(s.bucket_offset), s.n,
                      pulled_[rank].begin() + static_cast<ptrdiff_t>(s.bucket_offset));
        }
        return Status();
      };
      ranks_.push_back(
          make_server_worker(layout_, rank, Execution::create().value(), kGradients, apply)
              .value());
    }
    for (uint32_t rank = workers; rank < workers + servers; ++rank) {
      ranks_.push_back(
          make_server(layout_, rank, Execution::create().value(), kGradients, {}).value());
    }
  }

  // Runs a version, and returns all messages in the order in which they were sent. The buckets of
  // servers hold what the version before left there.
  std::vector<Sent> run(const Buckets& gradients, uint64_t version) {
    buckets_.resize(ranks_.size(), std::vector<float>(layout_->numel()));
    std::ranges::copy(gradients, buckets_.begin());
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      const Status status = ranks_[r]->start(buckets_[r], version);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    std::vector<Sent> sent;
    for (size_t delivered = 0;;) {
      for (uint32_t r = 0; r < ranks_.size(); ++r) {
        for (const OutgoingMessage& message : ranks_[r]->take_outgoing()) {
          sent.push_back({r, message.peer, {}, {message.bytes.begin(), message.bytes.end()}});
        }
      }
      if (delivered == sent.size()) break;
      for (const size_t end = sent.size(); delivered < end; ++delivered) {
        const Sent& message = sent[delivered];
        const Status status = ranks_[message.target]->receive(message.source, message.bytes);
        EXPECT_TRUE(status.ok()) << status.message();
      }
    }
    for (Sent& message : sent) message.packet = parse_packet(message.bytes).value();
    for (const auto& rank : ranks_) EXPECT_TRUE(rank->done());
    return sent;
  }

  const Layout& layout() const { return ranks_[0]->layout(); }
  uint32_t workers() const { return workers_; }
  bool is_worker(uint32_t rank) const { return rank < workers_; }
  uint32_t world() const { return static_cast<uint32_t>(ranks_.size()); }
  Exchange& rank(uint32_t r) { return *ranks_[r]; }
  const std::vector<float>& pulled(uint32_t worker) const { return pulled_[worker]; }
  uint64_t applied(uint32_t worker) const { return applied_[worker]; }

 private:
  uint32_t workers_;
  std::shared_ptr<const Layout> layout_;
  std::vector<std::unique_ptr<Exchange>> ranks_;
  Buckets buckets_;
  Buckets pulled_;
  std::vector<uint64_t> applied_;
};

bool holds_trits(const PacketFrame& frame) {
  return Codec::from_wire(frame.codec).value()->info().name == "terngrad";
}

float largest_of(const Buckets& gradients, const Segment& s) {
  float largest = 0;
  for (const auto& gradient : gradients) {
    for (uint64_t i = s.bucket_offset; i < s.bucket_offset + s.n; ++i) {
      largest = std::max(largest, std::fabs(gradient[i]));
    }
  }
  return largest;
}

// The test decodes the pushes with the codec alone, and adds their trits.
TEST(ServerGradients, PullsTheSharedScaleTimesTheExactAverageOfTheTrits) {
  const std::pair<uint32_t, uint32_t> worlds[] = {{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {5, 3}};
  for (const auto& [workers, servers] : worlds) {
    for (const char* codec : {"terngrad:clip=0", "terngrad:clip=0,pack=trits5,coder=rice"}) {
      Averaging job(workers, servers, {.codec = codec});
      for (uint64_t version = 0; version < 3; ++version) {
        const Buckets gradients = uneven_buckets(workers, job.layout().numel(), version);
        std::map<uint32_t, std::vector<int>> sums;  // by segment
        for (const Sent& message : job.run(gradients, version)) {
          if (!job.is_worker(message.source)) continue;
          size_t k = 0;
          for (uint32_t i = 0; i < job.layout().segments().size(); ++i) {
            const Segment& s = job.layout().segments()[i];
            if (s.owner != message.target || message.packet.frames.size() <= k) continue;
            const PacketFrame& frame = message.packet.frames[k++];
            if (!holds_trits(frame)) continue;
            std::vector<float> values(frame.n);
            Execution execution = Execution::create().value();
            ASSERT_TRUE(
                s.push_codec->decode(frame.payload, values, DecodeMode::kStore, execution).ok());
            // Each layer has one scale, the largest magnitude of all workers.
            const float scale = largest_of(gradients, s);
            sums[i].resize(s.n);
            for (uint64_t j = 0; j < s.n; ++j) {
              const int trit = values[j] > 0 ? 1 : values[j] < 0 ? -1 : 0;
              ASSERT_EQ(values[j], static_cast<float>(trit) * scale);
              sums[i][j] += trit;
            }
          }
        }
        ASSERT_EQ(sums.size(), 5u) << "all tensors but the bias";
        for (const auto& [i, sum] : sums) {
          const Segment& s = job.layout().segments()[i];
          const float unit = level_unit(largest_of(gradients, s), static_cast<int32_t>(workers));
          for (uint64_t j = 0; j < s.n; ++j) {
            ASSERT_EQ(job.pulled(0)[s.bucket_offset + j], static_cast<float>(sum[j]) * unit);
          }
        }
        for (uint32_t worker = 1; worker < workers; ++worker) {
          ASSERT_TRUE(same_bits(job.pulled(worker), job.pulled(0)));
        }
      }
    }
  }
}

TEST(ServerGradients, CountsTheBytesThatItSays) {
  constexpr uint64_t kValues = 40960;  // of each tensor; one tensor on each server
  for (uint32_t workers : {1u, 2u, 4u, 8u}) {
    for (uint32_t servers : {1u, 2u}) {
      for (const auto& [codec, trits] : {std::pair("terngrad", 4u), {"terngrad:pack=trits5", 5u}}) {
        std::vector<TensorInfo> tensors = {{"a", {kValues, 1}}, {"b", {kValues, 1}}};
        tensors.resize(servers);
        Averaging job(workers, servers, {.codec = codec}, tensors);
        const Buckets gradients = random_buckets(workers, servers * kValues, 1);
        int width = 0;
        while ((1u << width) < 2 * workers + 1) ++width;
        const uint64_t push = 4 + kValues / trits;  // the scale, and the trits
        const uint64_t pull = 4 + kValues * static_cast<uint64_t>(width) / 8;
        const uint64_t headers = 32 + 8 + 1 + 3;  // and the payload's length, 2 or 3 bytes
        const auto packet = [&](uint64_t n) { return headers + (n < 16384 ? 2 : 3) + n; };
        const uint64_t scales = 32 + 8 + 1 + 1 + 1 + 4;
        uint64_t messages = 0;
        for (const Sent& message : job.run(gradients, 0)) {
          const PacketFrame& frame = message.packet.frames.at(0);
          if (frame.n == kValues) {
            EXPECT_EQ(frame.payload.size(), job.is_worker(message.source) ? push : pull);
          } else {
            EXPECT_EQ(frame.payload.size(), 4u) << "one scale";
          }
          ++messages;
        }
        EXPECT_EQ(messages, 4u * workers * servers);
        for (uint32_t rank = 0; rank < job.world(); ++rank) {
          const ExchangeStats& stats = job.rank(rank).stats();
          const bool works = job.is_worker(rank);
          const uint64_t peers = works ? servers : workers;
          EXPECT_EQ(stats.scale_bytes_sent, peers * scales);
          const uint64_t pushed = peers * (scales + packet(push));
          const uint64_t pulled = peers * (scales + packet(pull));
          EXPECT_EQ(works ? stats.push_bytes_sent : stats.push_bytes_received, pushed);
          EXPECT_EQ(works ? stats.pull_bytes_received : stats.pull_bytes_sent, pulled);
          EXPECT_EQ(stats.values_received, peers * kValues) << "no scales";
          EXPECT_EQ(stats.values_sent, works ? 0 : peers * kValues);
        }
      }
    }
  }
}

TEST(ServerGradients, ResultDoesNotDependOnTheOrderOfArrival) {
  std::vector<float> first;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    ServerCluster cluster(
        {.workers = 4, .servers = 2, .codec = "terngrad", .options = kGradients, .versions = 6});
    const Status status = cluster.run({.seed = seed, .next = {}, .stalled = {}});
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_FALSE(cluster.replicas_differed());
    if (first.empty()) first = cluster.worker_model(0);
    EXPECT_TRUE(same_bits(first, cluster.worker_model(3))) << seed;
  }
}

TEST(ServerGradients, TensorsWithOtherCodecsAreAveragedAsFloats) {
  const LayoutOptions options = {.codec = "terngrad", .rules = {{"b.*", "raw"}, {"c.*", "bf16"}}};
  Averaging job(3, 2, options);
  const Buckets gradients = random_buckets(3, job.layout().numel(), 2);
  job.run(gradients, 0);
  for (const Segment& s : job.layout().segments()) {
    if (s.push_codec->info().name != "raw") continue;
    for (uint64_t i = s.bucket_offset; i < s.bucket_offset + s.n; ++i) {
      ASSERT_EQ(job.pulled(0)[i], (gradients[0][i] + gradients[1][i] + gradients[2][i]) / 3.0f);
    }
  }
}

TEST(ServerGradients, OtherCodecsNeedNoScales) {
  Averaging job(2, 1, {.codec = "3lc"});
  const Buckets gradients = random_buckets(2, job.layout().numel(), 2);
  EXPECT_EQ(job.run(gradients, 0).size(), 4u) << "two pushes and two pulls";
  EXPECT_TRUE(same_bits(job.pulled(0), job.pulled(1)));
}

TEST(ServerGradients, EveryRankSkipsAGradientThatIsNotFinite) {
  // The raw tensor is the second, the trits are the first.
  for (const uint64_t element : {uint64_t{7}, uint64_t{64 * 64 * 3 + 5}}) {
    Averaging job(3, 2, {.codec = "terngrad"});
    for (uint64_t version = 0; version < 3; ++version) {
      Buckets gradients = random_buckets(3, job.layout().numel(), version);
      if (version == 1) gradients[2][element] = std::numeric_limits<float>::infinity();
      job.run(gradients, version);
      for (uint32_t rank = 0; rank < job.world(); ++rank) {
        const auto& where = job.rank(rank).non_finite();
        ASSERT_EQ(where.has_value(), version == 1) << rank;
        if (!where) continue;
        EXPECT_EQ(where->rank, 2u);
        EXPECT_EQ(where->tensor, element == 7 ? "a.weight" : "a.bias");
        EXPECT_EQ(where->element, element == 7 ? 7 : 5);
      }
    }
    for (uint32_t worker = 0; worker < 3; ++worker) {
      EXPECT_EQ(job.applied(worker), 4u) << "two versions of two servers";
      for (float value : job.pulled(worker)) ASSERT_TRUE(std::isfinite(value));
    }
  }
}

TEST(ServerGradients, AMessageAtTheWrongTimeIsRefused) {
  Averaging job(2, 1, {.codec = "terngrad"});
  const Buckets gradients = random_buckets(2, job.layout().numel(), 1);
  const std::vector<Sent> sent = job.run(gradients, 0);
  const auto refused = [&](uint32_t rank, size_t message, const std::string& what) {
    const Status status = job.rank(rank).receive(sent[message].source, sent[message].bytes);
    EXPECT_EQ(status.code(), StatusCode::kUnexpectedMessage);
    EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
  };
  refused(2, 0, "rank 0 sent scales of version 0, but version 1 is under way");
  refused(0, 2, "rank 2 sent scales of version 0, not of version 1");

  Averaging fresh(2, 1, {.codec = "terngrad"});
  std::vector<float> bucket(fresh.layout().numel());
  ASSERT_TRUE(fresh.rank(2).start(bucket, 0).ok());
  const auto take = [&](size_t message) {
    return fresh.rank(2).receive(sent[message].source, sent[message].bytes);
  };
  EXPECT_EQ(fresh.rank(2).awaiting(), (std::vector<uint32_t>{0, 1}));
  ASSERT_TRUE(take(0).ok());
  EXPECT_EQ(fresh.rank(2).awaiting(), std::vector<uint32_t>{1});
  EXPECT_NE(take(0).message().find("rank 0 sent its scales of this step twice"), std::string::npos);
  const Status early = take(4);
  EXPECT_NE(early.message().find("rank 0 sent its push of version 0 before it was sent the scales"),
            std::string::npos)
      << early.message();
}

TEST(ServerGradients, SettingsThatCannotWorkAreNamed) {
  const auto refusal = [](uint32_t rank, LayoutOptions options, const ServerOptions& server,
                          const ShardUpdate& update = {}) {
    options.servers = 1;
    const auto layout =
        std::make_shared<const Layout>(Layout::create(server_tensors(), 4, options).value());
    Execution execution = Execution::create().value();
    const Status status =
        rank < 3 ? make_server_worker(layout, rank, std::move(execution), server, {}).status()
                 : make_server(layout, rank, std::move(execution), server, update).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  ServerOptions late = kGradients;
  late.backup = 1;
  EXPECT_EQ(refusal(3, {.codec = "terngrad"}, late),
            "server rank 3, pulls of gradients: codec terngrad needs the scales of all workers in "
            "each version; backup is 1 and staleness is 0, valid is 0 for both");
  late = kGradients;
  late.staleness = 2;
  EXPECT_NE(refusal(0, {.codec = "terngrad"}, late).find("worker rank 0"), std::string::npos);
  EXPECT_NE(refusal(3, {.codec = "raw"}, kGradients, [](std::span<float>) { return Status(); })
                .find("a server without a model takes no update"),
            std::string::npos);
  for (const char* pull : {"terngrad:clip=1", "raw", "qsgd:levels=4", "3lc"}) {
    const std::string message = refusal(1, {.codec = "terngrad", .pull_codec = pull}, kGradients);
    EXPECT_NE(message.find("worker rank 1, pulls of gradients: tensor 'a.weight', push terngrad"),
              std::string::npos)
        << message;
  }
  EXPECT_NE(refusal(1, {.codec = "terngrad", .pull_codec = "raw"}, kGradients)
                .find("pulled by the same codec or by qsgd with levels=3"),
            std::string::npos);
}

}  // namespace
}  // namespace gradwire
