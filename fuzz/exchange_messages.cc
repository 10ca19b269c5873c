// Runs the ranks of a job in this process and delivers their messages as the input says: as they
// are, damaged, twice, to the wrong rank or under a wrong name, also between steps and after a
// failure. Servers lose workers, which others replace, and help those that are behind. A rank that
// got only what an engine may hand over must never fail. If all got only that, every step ends, and
// all ranks hold the same bits.

#include <algorithm>
#include <bit>
#include <cstdio>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "fuzzing.h"
#include "gradwire/codec.h"
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
    "fp16",
    "truncate",
    "stoch3",
    "qgd",
    "topk2bit",
    "qsgd:bits=3,ef=on",
    "int8:ef=off",
    "qsgd:levels=2",  // as a pull codec: the sums of two workers' trits
};
constexpr uint64_t kMostSteps = 40;

// `codec` with a residual in bfloat16, if it can have one.
std::string with_half_residual(const std::string& codec) {
  std::string halved = codec;
  halved += codec.find(':') == std::string::npos ? ':' : ',';
  halved += "residual=bf16";
  return Codec::parse(halved).ok() ? halved : codec;
}

struct Message {
  uint32_t source;
  uint32_t target;
  std::vector<std::byte> bytes;
  bool honest;  // it comes from a rank that got only what an engine may hand over
  // Of a server exchange, without bytes:
  std::optional<uint64_t> joins = {};   // the source, a worker, pushes from this version on
  std::optional<uint64_t> caught = {};  // `model` is the source's, a server's, at this version
  std::vector<float> model = {};
};

struct Rank {
  std::unique_ptr<Exchange> exchange;
  std::vector<float> bucket;
  std::vector<float> model;            // of a worker; of a server as its workers have it
  uint64_t steps = 0;                  // that it began
  bool gone = false;                   // a worker whose process ended; another may come
  std::map<uint32_t, uint64_t> begun;  // then: the versions of servers that let another in
  bool honest = true;
  bool failed = false;
  bool retracted = true;  // there is no step that may be retracted
};

class Job {
 public:
  explicit Job(ChoiceReader& choices) : choices_(choices) {
    const uint8_t first = choices.below(2 * std::size(kKinds));
    kind_ = kKinds[first % std::size(kKinds)];
    LayoutOptions options = {.codec = std::string(choices.of(kCodecs)), .min_numel = 16};
    if (first >= std::size(kKinds)) choose_pulls_and_residuals(options);
    auto world = static_cast<uint32_t>(1 + choices.below(4));
    if (kind_ == "server") {
      options.servers = 1 + choices.below(2);
      workers_ = world;
      world += options.servers;
      server_options_.backup = choices.below(2);
      server_options_.staleness = choices.below(3);
      server_options_.history = 1 + choices.below(4);
      if (choices.yes()) server_options_.pulls = ServerOptions::Pulls::kGradients;
      shares_scales_ = server_options_.pulls == ServerOptions::Pulls::kGradients &&
                       options.codec.starts_with("terngrad");
      if (choices.yes()) server_options_.behind = ServerOptions::Behind::kReport;
      if (choices.yes()) first_version_ = choices.word();
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
    if (kind_ == "server") begin_at_version();
  }

  [[nodiscard]] bool made() const { return !ranks_.empty(); }

  void run() {
    for (int i = 0; i < 1000 && !choices_.at_end(); ++i) {
      const uint32_t rank = choices_.below(static_cast<uint8_t>(ranks_.size()));
      switch (choices_.below(kind_ == "server" ? 15 : 10)) {
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
        case 10:
          lose(rank, choices_.below(static_cast<uint8_t>(workers_)));
          break;
        case 11:
          end_process(rank);
          break;
        case 12:
          let_in(rank, choices_.below(static_cast<uint8_t>(workers_)));
          break;
        case 13:
          help_those_behind(rank);
          break;
        case 14:
          misuse(rank);
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
  void choose_pulls_and_residuals(LayoutOptions& options) {
    options.pull_codec = choices_.yes() ? choices_.of(kCodecs) : options.codec;
    if (choices_.yes()) options.codec = with_half_residual(options.codec);
    if (choices_.yes()) options.pull_codec = with_half_residual(options.pull_codec);
  }

  [[nodiscard]] bool serves(uint32_t rank) const { return kind_ == "server" && rank >= workers_; }
  [[nodiscard]] ServerSide& server(uint32_t rank) {
    return *as_server(ranks_[rank].exchange.get());
  }
  [[nodiscard]] WorkerSide& worker(uint32_t rank) {
    return *as_worker(ranks_[rank].exchange.get());
  }
  [[nodiscard]] uint32_t world() const { return static_cast<uint32_t>(ranks_.size()); }
  // The values of a server's tensors, of two buckets.
  template <typename Function>  // function(float& a, const float& b)
  void for_values_of(uint32_t server, std::span<float> a, std::span<const float> b,
                     const Function& function) const {
    for (const Segment& s : layout_->segments()) {
      if (s.owner != server) continue;
      for (uint64_t i = s.bucket_offset; i < s.bucket_offset + s.n; ++i) function(a[i], b[i]);
    }
  }

  Result<std::unique_ptr<Exchange>> make(uint32_t rank) {
    Execution execution = Execution::create().value();
    if (kind_ == "server") {
      ExchangeOptions options;
      if (!serves(rank)) {
        options.apply = [this, rank](uint32_t server, uint64_t version,
                                     std::span<const float> delta) {
          return apply(rank, server, version, delta);
        };
      } else if (server_options_.pulls == ServerOptions::Pulls::kUpdates) {
        options.update = [](std::span<float> bucket) {
          for (float& value : bucket) value *= -0.1f;
          return Status();
        };
      }
      return make_exchange(server_options_.text(), layout_, rank, std::move(execution), options);
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
    for_values_of(server, ranks_[rank].model, delta,
                  [&](float& value, float change) { here.push_back(value += change); });
    if (ranks_[rank].honest) compare_models(server, version, here);
    return {};
  }

  void compare_models(uint32_t server, uint64_t version, const std::vector<float>& here) {
    const auto [first, added] = models_.emplace(std::pair(server, version), here);
    require(same_bits(first->second, here), "two ranks hold different models");
  }

  // Keeps a server's copy of the workers' model.
  void follow(uint32_t rank) {
    const uint64_t finished = server(rank).version() - 1;
    if (ranks_[rank].exchange->non_finite()) return;
    std::vector<float> here;
    for_values_of(rank, ranks_[rank].model, ranks_[rank].bucket,
                  [&](float& value, float change) { here.push_back(value += change); });
    if (ranks_[rank].honest) compare_models(rank, finished, here);
  }

  // Whatever a rank sends after a message that is not `honest`, it may be wrong.
  void account(uint32_t rank, const Status& status, bool honest) {
    Rank& target = ranks_[rank];
    require(status.ok() || !status.message().empty(), "a failure without a message");
    // A push of a worker that lacks more than the history.
    const bool refused = server_options_.backup > 0 && serves(rank) &&
                         server_options_.behind == ServerOptions::Behind::kRefuse &&
                         status.code() == StatusCode::kLimitExceeded;
    honest = honest && !refused;
    if (target.honest && honest) {
      if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
      require(status.ok(), "a true message is refused");
    }
    target.failed = target.failed || !status.ok();
    target.honest = target.honest && honest && status.ok();
    if (serves(rank) && server(rank).version() > followed_[rank]) {
      followed_[rank] = server(rank).version();
      follow(rank);
    }
    collect(rank);
  }

  void collect(uint32_t rank) {
    for (const OutgoingMessage& message : ranks_[rank].exchange->take_outgoing()) {
      require(message.peer < ranks_.size() && message.peer != rank, "a message to nobody");
      const Exchange& target = *ranks_[message.peer].exchange;
      require(message.bytes.size() <= target.max_message_size(), "a message above the limit");
      const Message sent = {
          rank, message.peer, {message.bytes.begin(), message.bytes.end()}, ranks_[rank].honest};
      if (!lost_.contains({rank, message.peer}) && !lost_.contains({message.peer, rank})) {
        links_[{rank, message.peer}].push_back(sent);
      }
      if (sent_.size() < 64) sent_.push_back(sent);
    }
  }

  [[nodiscard]] uint64_t next_step(uint32_t rank) const {
    if (!serves(rank)) return ranks_[rank].steps;
    return as_server(ranks_[rank].exchange.get())->version();
  }

  void start(uint32_t rank, bool patient) {
    Rank& starting = ranks_[rank];
    if (starting.failed || starting.gone || starting.steps == kMostSteps) return;
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
    if ((ranks_[target].failed || ranks_[target].gone) && awaited) return false;
    const std::vector<uint32_t> listening = exchange.listening();
    std::vector<uint32_t> from = exchange.awaiting();
    from.insert(from.end(), listening.begin(), listening.end());
    for (auto& [ends, messages] : links_) {
      if (ends.second != target || messages.empty()) continue;
      if (awaited != (std::ranges::count(from, ends.first) > 0)) continue;
      const Message message = std::move(messages.front());
      messages.pop_front();
      deliver(message, awaited && message.honest);
      return true;
    }
    return false;
  }

  void deliver(const Message& message, bool honest) {
    if (message.joins) {
      account(message.target, server(message.target).join(message.source, *message.joins), honest);
    } else if (message.caught) {
      for_values_of(message.source, ranks_[message.target].model, message.model,
                    [](float& value, float taken) { value = taken; });
      account(message.target, worker(message.target).catch_up(message.source, *message.caught),
              honest);
    } else {
      receive(message.target, message.source, message.bytes, honest);
    }
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

  // All servers and workers go on from a version of an earlier run.
  void begin_at_version() {
    for (uint32_t rank = 0; rank < world(); ++rank) {
      for (uint32_t other = workers_; other < world(); ++other) {
        if (serves(rank) && rank != other) continue;
        const Status status = serves(rank) ? server(rank).set_version(first_version_)
                                           : worker(rank).set_version(other, first_version_);
        require(status.ok(), "a version is refused");
      }
      followed_[rank] = first_version_;
    }
  }

  // The server goes on without the worker, which may live.
  void lose(uint32_t rank, uint32_t lost) {
    if (!serves(rank) || ranks_[rank].failed || lost_.contains({rank, lost})) return;
    const Status status = server(rank).lose(lost);
    require((status.code() == StatusCode::kInvalidArgument) == shares_scales_,
            "a worker may be lost unless its scales are needed");
    if (shares_scales_) return explain(status);
    lost_.insert({rank, lost});
    links_[{rank, lost}].clear();
    links_[{lost, rank}].clear();
    ranks_[lost].begun.erase(rank);
    account(rank, status, true);
  }

  static void explain(const Status& status) {
    require(!status.message().empty(), "a refusal without a message");
  }

  void end_process(uint32_t rank) {
    if (serves(rank)) return;
    ranks_[rank].gone = true;
    ranks_[rank].begun.clear();
  }

  // Between two versions, a server gives another process the place of a worker that it has lost.
  void let_in(uint32_t rank, uint32_t place) {
    Rank& joins = ranks_[place];
    if (!serves(rank) || ranks_[rank].failed || !ranks_[rank].exchange->done()) return;
    if (!joins.gone || !lost_.contains({rank, place})) return;
    lost_.erase({rank, place});
    const uint64_t version = server(rank).version();
    joins.begun[rank] = version;
    for_values_of(rank, joins.model, ranks_[rank].model,
                  [](float& value, float taken) { value = taken; });
    account(rank, server(rank).join(place, version), true);
    if (joins.begun.size() == world() - workers_) enter(place);
  }

  // A process has the models of all servers, and pushes from the newest version on.
  void enter(uint32_t place) {
    Rank& joins = ranks_[place];
    uint64_t first = 0;
    for (const auto& [rank, version] : joins.begun) first = std::max(first, version);
    joins.exchange = make(place).value();
    joins.honest = joins.retracted = true;
    joins.gone = joins.failed = false;
    joins.steps = first - first_version_;
    for (const auto& [rank, version] : std::exchange(joins.begun, {})) {
      joins.honest = joins.honest && ranks_[rank].honest;
      require(worker(place).set_version(rank, version).ok(), "a version is refused");
      require(worker(place).join(rank, first, joins.bucket).ok(), "a process can't join");
      links_[{place, rank}].push_back(
          {.source = place, .target = rank, .bytes = {}, .honest = joins.honest, .joins = first});
    }
  }

  // Sends the model to workers that lack versions which are no longer kept.
  void help_those_behind(uint32_t rank) {
    if (!serves(rank) || ranks_[rank].failed) return;
    for (uint32_t behind : server(rank).behind()) {
      links_[{rank, behind}].push_back({.source = rank,
                                        .target = behind,
                                        .bytes = {},
                                        .honest = ranks_[rank].honest,
                                        .caught = server(rank).version(),
                                        .model = ranks_[rank].model});
      account(rank, server(rank).caught_up(behind), true);
    }
  }

  // Calls with any arguments at any time. One that is refused changes nothing.
  void misuse(uint32_t rank) {
    const uint32_t peer = choices_.below(static_cast<uint8_t>(world() + 1));
    const uint64_t version = choices_.yes() ? choices_.number() : choices_.below(64);
    std::vector<float> bucket(choices_.yes() ? layout_->numel() : choices_.below(64));
    const uint8_t call = choices_.below(4);
    Status status;
    if (serves(rank)) {
      status = call == 0   ? server(rank).set_version(version)
               : call == 1 ? server(rank).caught_up(peer)
               : call == 2 ? server(rank).join(peer, version)
                           : server(rank).lose(peer);
    } else {
      status = call == 0   ? worker(rank).set_version(peer, version)
               : call == 1 ? worker(rank).catch_up(peer, version)
                           : worker(rank).join(peer, version, ranks_[rank].bucket);
      if (bucket.size() != layout_->numel()) {
        require(!worker(rank).join(peer, version, bucket).ok(), "a bucket of another size");
      }
    }
    if (!status.ok()) return explain(status);
    followed_[rank] = ~uint64_t{0};
    account(rank, status, false);
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

  // Makes all servers lose a worker that is gone, or that one of them has lost.
  bool is_left_out(uint32_t rank) {
    bool left_out = ranks_[rank].gone;
    for (uint32_t other = workers_; other < world(); ++other) {
      left_out = left_out || lost_.contains({other, rank});
    }
    if (!left_out || kind_ != "server") return left_out;
    ranks_[rank].gone = true;
    for (uint32_t other = workers_; other < world(); ++other) lose(other, rank);
    return true;
  }

  // Steps or versions since the beginning.
  [[nodiscard]] uint64_t steps_of(uint32_t rank) const {
    return next_step(rank) - (serves(rank) ? first_version_ : 0);
  }

  // Brings all ranks to the same step and delivers what is on the way.
  void finish() {
    uint64_t steps = 0;
    bool any = false;
    for (uint32_t rank = 0; rank < world(); ++rank) {
      if (serves(rank) || is_left_out(rank)) continue;
      steps = std::max(steps, ranks_[rank].steps);
      any = true;
    }
    if (!any || (shares_scales_ && std::ranges::any_of(ranks_, &Rank::gone))) return;
    for (bool moved = true; moved;) {
      moved = false;
      for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
        if (ranks_[rank].gone) continue;
        while (deliver_next(rank)) moved = true;
        if (!ranks_[rank].exchange->done() || steps_of(rank) >= steps) continue;
        start(rank, true);
        moved = true;
      }
    }
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].gone) continue;
      // A server may have begun a version for which no worker pushes.
      require(serves(rank) || ranks_[rank].exchange->done(), "a step does not end");
      require(steps_of(rank) == steps, "a rank is behind");
      const bool reduces = kind_ != "reduce-scatter" && kind_ != "server";
      if (reduces && steps > 0) {
        require(same_bits(ranks_[rank].bucket, ranks_.front().bucket), "the results differ");
      }
    }
  }

  ChoiceReader& choices_;
  std::string kind_;
  uint32_t workers_ = 0;  // of a server exchange
  uint64_t first_version_ = 0;
  bool shares_scales_ = false;  // every version needs all workers
  ServerOptions server_options_;
  std::shared_ptr<const Layout> layout_;
  std::vector<Rank> ranks_;
  std::map<std::pair<uint32_t, uint32_t>, std::deque<Message>> links_;  // by source and target
  std::vector<Message> sent_;
  std::map<std::pair<uint32_t, uint64_t>, std::vector<float>> models_;  // by server and version
  std::map<uint32_t, uint64_t> followed_;         // by server: versions in its copy of the model
  std::set<std::pair<uint32_t, uint32_t>> lost_;  // servers and workers that they have lost
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ChoiceReader choices({data, size});
  Job job(choices);
  if (job.made()) job.run();
  return 0;
}
