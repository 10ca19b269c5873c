// Runs the ranks of a job in this process and delivers their messages as the input says: as they
// are, damaged, twice, to the wrong rank or under a wrong name, also between steps and after a
// failure. A rank that got only what an engine may hand over must never fail. If all got only that,
// every step ends, and all ranks hold the same bits.

#include <algorithm>
#include <bit>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "fuzzing.h"
#include "gradwire/exchange.h"
#include "gradwire/server.h"

namespace {

using namespace gradwire;
using namespace gradwire::fuzzing;

constexpr std::string_view kKinds[] = {
    "sharded",
    "ring",
    "broadcast",
    "terngrad",
    "hierarchical:ranks=2",
    "hierarchical:between=ring,within=ring,ranks=2",
    "hierarchical:within=sharded,ranks=2,within_codec=int8:ef=off",
    "reduce-scatter",
    "allgather",
    "server",
};
constexpr std::string_view kCodecs[] = {
    "3lc",
    "3lc:s=1.5,coder=rice,bucket=35",
    "terngrad",
    "terngrad:pack=trits5,coder=rice,bucket=40",
    "qsgd:coder=elias",
    "qsgd:bits=2,norm=l2",
    "raw",
    "bf16",
    "int8",
    "topk:ratio=0.1,index=rice",
    "stc:density=0.2",
    "onebit",
    "inceptionn",
};
constexpr uint64_t kMostSteps = 40;

struct Message {
  uint32_t source;
  uint32_t target;
  std::vector<std::byte> bytes;
  bool honest;  // it comes from a rank that got only what an engine may hand over
};

struct Rank {
  std::unique_ptr<Exchange> exchange;
  std::vector<float> bucket;
  std::vector<float> model;  // of a worker
  uint64_t steps = 0;        // that it began
  bool honest = true;
  bool failed = false;
  bool retracted = true;  // there is no step that may be retracted
};

class Job {
 public:
  explicit Job(ChoiceReader& choices) : choices_(choices) {
    kind_ = choices.of(kKinds);
    LayoutOptions options = {.codec = std::string(choices.of(kCodecs)), .min_numel = 16};
    auto world = static_cast<uint32_t>(1 + choices.below(4));
    if (kind_ == "server") {
      options.servers = 1 + choices.below(2);
      workers_ = world;
      world += options.servers;
      server_options_.backup = choices.below(2);
      server_options_.staleness = choices.below(3);
      server_options_.history = 1 + choices.below(4);
      if (choices.yes()) server_options_.pulls = ServerOptions::Pulls::kGradients;
      if (choices.yes()) server_options_.behind = ServerOptions::Behind::kReport;
    }
    auto layout = Layout::create({{"a", {20, 17}}, {"b", {5}}, {"c", {64, 9}}}, world, options);
    if (!layout.ok()) return;
    layout_ = std::make_shared<const Layout>(std::move(layout).value());
    const uint32_t ranks = kind_.starts_with("hierarchical") ? 2 * world : world;
    ranks_.resize(ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      auto made = make(rank);
      if (!made.ok()) {
        require(!made.status().message().empty(), "a refusal without a message");
        ranks_.clear();
        return;
      }
      ranks_[rank].exchange = std::move(made).value();
      ranks_[rank].bucket.resize(layout_->numel());
      ranks_[rank].model.resize(layout_->numel());
    }
  }

  [[nodiscard]] bool made() const { return !ranks_.empty(); }

  void run() {
    for (int i = 0; i < 1000 && !choices_.at_end(); ++i) {
      const uint32_t rank = choices_.below(static_cast<uint8_t>(ranks_.size()));
      switch (choices_.below(10)) {
        case 0:
        case 1:
          start(rank, choices_.yes());
          break;
        case 2:
        case 3:
        case 4:
          deliver_next(rank);
          break;
        case 5:
          deliver_other(rank);
          break;
        case 6:
          deliver_bytes(rank);
          break;
        case 7:
          deliver_next(rank, /*awaited=*/false);
          break;
        case 8:
          retract_everywhere();
          break;
        default:
          touch(rank);
      }
    }
    // A version that leaves pushes out may wait for a worker that has nothing more to push.
    if (server_options_.backup > 0 || server_options_.staleness > 0) return;
    if (std::ranges::all_of(ranks_, &Rank::honest)) finish();
  }

 private:
  [[nodiscard]] bool serves(uint32_t rank) const { return kind_ == "server" && rank >= workers_; }

  Result<std::unique_ptr<Exchange>> make(uint32_t rank) {
    const auto as_exchange = [](auto made) -> Result<std::unique_ptr<Exchange>> {
      if (!made.ok()) return made.status();
      return std::unique_ptr<Exchange>(std::move(made).value());
    };
    Execution execution = Execution::create().value();
    if (serves(rank)) {
      ShardUpdate update = [](std::span<float> bucket) {
        for (float& value : bucket) value *= -0.1f;
        return Status();
      };
      if (server_options_.pulls == ServerOptions::Pulls::kGradients) update = {};
      return as_exchange(
          make_server(layout_, rank, std::move(execution), server_options_, std::move(update)));
    }
    if (kind_ == "server") {
      return as_exchange(make_server_worker(
          layout_, rank, std::move(execution), server_options_,
          [this, rank](uint32_t server, uint64_t version, std::span<const float> delta) {
            return apply(rank, server, version, delta);
          }));
    }
    if (kind_ == "reduce-scatter") {
      return make_reduce_scatter_exchange(layout_, rank, std::move(execution));
    }
    if (kind_ == "allgather") return make_allgather_exchange(layout_, rank, std::move(execution));
    return make_exchange(kind_, layout_, rank, std::move(execution));
  }

  // Workers that got only true messages hold the same model at the same version of a server.
  Status apply(uint32_t rank, uint32_t server, uint64_t version, std::span<const float> delta) {
    std::vector<float> here;
    for (const Segment& s : layout_->segments()) {
      if (s.owner != server) continue;
      for (uint64_t i = s.bucket_offset; i < s.bucket_offset + s.n; ++i) {
        here.push_back(ranks_[rank].model[i] += delta[i]);
      }
    }
    if (ranks_[rank].honest) {
      const auto [first, added] = models_.emplace(std::pair(server, version), here);
      require(same_bits(first->second, here), "two workers hold different models");
    }
    return {};
  }

  // Whatever a rank sends after a message that is not `honest`, it may be wrong.
  void account(uint32_t rank, const Status& status, bool honest) {
    Rank& target = ranks_[rank];
    require(status.ok() || !status.message().empty(), "a failure without a message");
    if (target.honest && honest) {
      if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
      require(status.ok(), "a true message is refused");
    }
    target.failed = target.failed || !status.ok();
    target.honest = target.honest && honest && status.ok();
    collect(rank);
  }

  void collect(uint32_t rank) {
    for (const OutgoingMessage& message : ranks_[rank].exchange->take_outgoing()) {
      require(message.peer < ranks_.size() && message.peer != rank, "a message to nobody");
      const Exchange& target = *ranks_[message.peer].exchange;
      require(message.bytes.size() <= target.max_message_size(), "a message above the limit");
      const Message sent = {
          rank, message.peer, {message.bytes.begin(), message.bytes.end()}, ranks_[rank].honest};
      links_[{rank, message.peer}].push_back(sent);
      if (sent_.size() < 64) sent_.push_back(sent);
    }
  }

  [[nodiscard]] uint64_t next_step(uint32_t rank) const {
    if (!serves(rank)) return ranks_[rank].steps;
    return static_cast<const ServerSide&>(*ranks_[rank].exchange).version();
  }

  void start(uint32_t rank, bool patient) {
    Rank& starting = ranks_[rank];
    if (starting.failed || starting.steps == kMostSteps) return;
    if (!starting.exchange->done()) {
      if (patient) return;
      std::vector<float> other(starting.bucket.size());
      require(!starting.exchange->start(other, starting.steps).ok(), "two steps at once");
      return;
    }
    uint64_t state = starting.steps * 64 + rank;
    for (float& value : starting.bucket) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      value = static_cast<float>(static_cast<int32_t>(state >> 33)) * 0x1p-30f - 1.0f;
    }
    if (choices_.below(16) == 15) {
      starting.bucket[choices_.word() % starting.bucket.size()] = std::bit_cast<float>(0x7FC00000);
    }
    const uint64_t step = next_step(rank);
    ++starting.steps;
    starting.retracted = false;
    account(rank, starting.exchange->start(starting.bucket, step), true);
  }

  // The oldest message from any rank that the target awaits, as an engine would hand it over, or
  // that it does not await.
  bool deliver_next(uint32_t target, bool awaited = true) {
    const Exchange& exchange = *ranks_[target].exchange;
    if (ranks_[target].failed && awaited) return false;
    const std::vector<uint32_t> listening = exchange.listening();
    std::vector<uint32_t> from = exchange.awaiting();
    from.insert(from.end(), listening.begin(), listening.end());
    for (auto& [ends, messages] : links_) {
      if (ends.second != target || messages.empty()) continue;
      if (awaited != (std::ranges::count(from, ends.first) > 0)) continue;
      const Message message = std::move(messages.front());
      messages.pop_front();
      receive(target, message.source, message.bytes, awaited && message.honest);
      return true;
    }
    return false;
  }

  void receive(uint32_t target, uint32_t peer, std::span<const std::byte> bytes, bool honest) {
    // Exactly as many bytes as the message has, which are gone when the call returns.
    auto copy = std::make_unique<std::byte[]>(bytes.size());
    std::ranges::copy(bytes, copy.get());
    if (!honest) ranks_[target].honest = false;
    account(target, ranks_[target].exchange->receive(peer, {copy.get(), bytes.size()}), honest);
  }

  // Any message of the past, perhaps damaged, perhaps under another name.
  void deliver_other(uint32_t target) {
    if (sent_.empty()) return;
    const Message& message = sent_[choices_.word() % sent_.size()];
    std::vector<std::byte> bytes = message.bytes;
    for (int i = choices_.below(4); i > 0 && !bytes.empty(); --i) {
      bytes[choices_.word() % bytes.size()] = static_cast<std::byte>(choices_.below(255));
    }
    if (choices_.below(8) == 0) bytes.resize(choices_.word() % (bytes.size() + 1));
    if (choices_.yes()) repair_packet(bytes);
    const uint32_t peer =
        choices_.yes() ? message.source : choices_.below(static_cast<uint8_t>(ranks_.size() + 1));
    receive(target, peer, bytes, false);
  }

  void deliver_bytes(uint32_t target) {
    const std::span<const uint8_t> data = choices_.bytes(choices_.below(255));
    std::vector<std::byte> bytes = exact_copy(data);
    const uint32_t peer = choices_.below(static_cast<uint8_t>(ranks_.size() + 1));
    if (choices_.yes()) repair_packet(bytes);
    receive(target, peer, bytes, false);
  }

  // No rank applies the step that all have ended.
  void retract_everywhere() {
    for (const Rank& rank : ranks_) {
      if (rank.failed || rank.retracted || !rank.exchange->done()) return;
      if (rank.steps != ranks_.front().steps) return;
    }
    for (Rank& rank : ranks_) {
      rank.retracted = true;
      rank.exchange->retract();
    }
  }

  // Residuals and counters, which change no step but by what is added.
  void touch(uint32_t number) {
    Rank& rank = ranks_[number];
    if (!rank.exchange->done() || rank.failed) return;
    std::vector<ResidualPiece> pieces = rank.exchange->export_residuals();
    for (ResidualPiece& piece : pieces) {
      if (choices_.yes()) piece.offset += choices_.word();
      if (choices_.below(8) == 0) piece.offset = choices_.number();
      const Status status = rank.exchange->import_residual(piece);
      require(status.ok() || !status.message().empty(), "a refusal without a message");
    }
    rank.exchange->scale_residuals(0.5f);
    require(rank.exchange->tensor_traffic().size() == layout_->tensors().size(),
            "the traffic of a tensor is missing");
    require(rank.exchange->check_peer(number, rank.exchange->describe()).ok(),
            "a rank differs from itself");
  }

  // Brings all ranks to the same step and delivers what is on the way.
  void finish() {
    uint64_t steps = 0;
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (!serves(rank)) steps = std::max(steps, ranks_[rank].steps);
    }
    for (bool moved = true; moved;) {
      moved = false;
      for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
        while (deliver_next(rank)) moved = true;
        if (!ranks_[rank].exchange->done() || next_step(rank) >= steps) continue;
        start(rank, true);
        moved = moved || !serves(rank);
      }
    }
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      // A server may have begun a version for which no worker pushes.
      require(serves(rank) || ranks_[rank].exchange->done(), "a step does not end");
      require(next_step(rank) == steps, "a rank is behind");
      const bool reduces = kind_ != "reduce-scatter" && kind_ != "server";
      if (reduces && steps > 0) {
        require(same_bits(ranks_[rank].bucket, ranks_.front().bucket), "the results differ");
      }
    }
  }

  ChoiceReader& choices_;
  std::string kind_;
  uint32_t workers_ = 0;
  ServerOptions server_options_;
  std::shared_ptr<const Layout> layout_;
  std::vector<Rank> ranks_;
  std::map<std::pair<uint32_t, uint32_t>, std::deque<Message>> links_;  // by source and target
  std::vector<Message> sent_;
  std::map<std::pair<uint32_t, uint64_t>, std::vector<float>> models_;  // by server and version
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ChoiceReader choices({data, size});
  Job job(choices);
  if (job.made()) job.run();
  return 0;
}
