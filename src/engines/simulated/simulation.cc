#include "engines/simulated/simulation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <map>
#include <utility>

#include "base/return_if_error.h"
#include "engines/simulated/event_clock.h"
#include "engines/simulated/make_exchanges.h"

namespace gradwire {
namespace {

using Watch = std::chrono::steady_clock;
constexpr Watch::duration kBetweenLooks = std::chrono::milliseconds(100);

// A message that has come.
struct Letter {
  uint32_t source;
  uint32_t bucket;
  uint32_t way;  // messages on the longest way that ends with this one
  OutgoingMessage message;
};

struct Rank {
  std::vector<std::unique_ptr<Exchange>> exchanges;  // of each bucket
  std::vector<std::vector<float>> values;
  std::vector<uint32_t> ways;  // messages on the longest way to each bucket
  std::deque<Letter> mailbox;
  uint32_t bucket = 0;   // the first bucket that is not done
  uint32_t started = 0;  // so many buckets have started: one more at most, whose turn it is not yet
  bool busy = false;     // whether the thread computes
  double codec_seconds = 0;
};

// Remembers the costs, because there are many segments and few codecs.
CostOfCodec remember(CostOfCodec cost) {
  if (!cost) return [](const std::string&) { return CodecCost(); };
  const auto known = std::make_shared<std::map<std::string, CodecCost>>();
  return [cost = std::move(cost), known](const std::string& codec) {
    const auto [found, is_new] = known->try_emplace(codec);
    if (is_new) found->second = cost(codec);
    return found->second;
  };
}

class RunningSimulation final : public Simulation {
 public:
  explicit RunningSimulation(SimulationOptions options)
      : options_(std::move(options)),
        links_(options_.network, options_.ranks, clock_),
        ranks_(options_.ranks) {}

  Status make_ranks();
  Result<SimulatedStep> step() override;
  std::vector<ExchangeStats> stats(uint32_t rank) const override {
    std::vector<ExchangeStats> stats;
    for (const auto& exchange : ranks_[rank].exchanges) stats.push_back(exchange->stats());
    return stats;
  }

 private:
  void begin_step(uint32_t r);
  // Lets a rank that does not compute do what it can: take a message, or start a bucket.
  void work(uint32_t r);
  // Hands over the first message that is awaited. false: there is none.
  bool take_letter(Rank& rank, Status& status);
  // After a call of a bucket that took `letters` messages: charges its time, then sends its
  // messages.
  void finish_call(uint32_t r, uint32_t bucket, uint32_t letters, const Status& status);
  void send(uint32_t r, uint32_t bucket, std::vector<OutgoingMessage> messages);
  void arrive(uint32_t r, Letter letter);
  [[nodiscard]] Status check_end() const;
  // Calls options_.look_up if it is time.
  void look_up();

  SimulationOptions options_;
  EventClock clock_;
  Links links_;
  std::vector<Rank> ranks_;
  double charged_ = 0;  // by the codecs, in the call under way
  uint64_t step_ = 0;
  double began_ = 0;  // the time when the step began
  SimulatedStep now_;
  Status failure_;
  bool is_under_way_ = false;  // a step, also one that an exception has ended
  Watch::time_point looked_up_ = Watch::now();
};

Status RunningSimulation::make_ranks() {
  GW_ASSIGN_OR_RETURN(Execution execution, Execution::create());
  const ShardCodecFactory codecs = charge(host_shard_codecs(std::move(execution)),
                                          remember(std::move(options_.cost)), &charged_);
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    GW_ASSIGN_OR_RETURN(ranks_[r].exchanges, make_exchanges(options_, r, codecs));
    for (const SimulatedBucket& bucket : options_.buckets) {
      ranks_[r].values.emplace_back(bucket.layout->numel());
    }
    look_up();
  }
  return {};
}

void RunningSimulation::look_up() {
  if (!options_.look_up || Watch::now() - looked_up_ < kBetweenLooks) return;
  options_.look_up();
  looked_up_ = Watch::now();
}

Result<SimulatedStep> RunningSimulation::step() {
  if (is_under_way_) {
    return Status(StatusCode::kInvalidArgument, "a step of this simulation was interrupted");
  }
  is_under_way_ = true;
  now_ = SimulatedStep();
  now_.traffic.resize(ranks_.size());
  began_ = clock_.now() + (step_ > 0 ? options_.pause : 0);
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    begin_step(r);
    look_up();
  }
  while (failure_.ok() && clock_.run_next()) look_up();
  is_under_way_ = false;
  GW_RETURN_IF_ERROR(failure_);
  GW_RETURN_IF_ERROR(check_end());
  for (const Rank& rank : ranks_) {
    now_.codec_seconds = std::max(now_.codec_seconds, rank.codec_seconds);
  }
  ++step_;
  return std::move(now_);
}

void RunningSimulation::begin_step(uint32_t r) {
  Rank& rank = ranks_[r];
  rank.bucket = 0;
  rank.started = 0;
  rank.ways.assign(options_.buckets.size(), 0);
  rank.codec_seconds = 0;
  const uint64_t workers = ranks_.size() - options_.network.ranks_alone;
  uint64_t at = (r + step_ * workers) * options_.stride;
  for (std::vector<float>& values : rank.values) {
    for (float& value : values) value = options_.values[at++ % options_.values.size()];
  }
  for (const SimulatedBucket& bucket : options_.buckets) {
    clock_.at(began_ + bucket.ready, [this, r] { work(r); });
  }
}

void RunningSimulation::work(uint32_t r) {
  Rank& rank = ranks_[r];
  if (rank.busy || rank.bucket == options_.buckets.size() || !failure_.ok()) return;
  charged_ = 0;
  Status status;
  const uint32_t next = rank.started;
  if (rank.bucket < next && take_letter(rank, status)) {
    finish_call(r, rank.bucket, 1, status);
  } else if (next < std::min<size_t>(rank.bucket + 2, options_.buckets.size()) &&
             clock_.now() >= began_ + options_.buckets[next].ready) {
    ++rank.started;
    status = rank.exchanges[next]->start(rank.values[next], step_);
    finish_call(r, next, 0, status);
  }
}

bool RunningSimulation::take_letter(Rank& rank, Status& status) {
  if (rank.mailbox.empty()) return false;
  Exchange& exchange = *rank.exchanges[rank.bucket];
  const std::vector<uint32_t> awaited = exchange.awaiting();
  const auto found = std::ranges::find_if(rank.mailbox, [&](const Letter& letter) {
    return letter.bucket == rank.bucket && std::ranges::binary_search(awaited, letter.source);
  });
  if (found == rank.mailbox.end()) return false;
  const Letter letter = std::move(*found);
  rank.mailbox.erase(found);
  rank.ways[rank.bucket] = std::max(rank.ways[rank.bucket], letter.way);
  status = exchange.check_size(letter.source, letter.message.bytes.size());
  if (status.ok()) status = exchange.receive(letter.source, letter.message.bytes);
  return true;
}

void RunningSimulation::finish_call(uint32_t r, uint32_t bucket, uint32_t letters,
                                    const Status& status) {
  if (!status.ok()) {
    failure_ = status;
    return;
  }
  Rank& rank = ranks_[r];
  std::vector<OutgoingMessage> messages = rank.exchanges[bucket]->take_outgoing();
  const double count = letters + static_cast<double>(messages.size());
  rank.codec_seconds += charged_;
  rank.busy = true;
  const double end = clock_.now() + charged_ + count * options_.per_message;
  clock_.at(end, [this, r, bucket, messages = std::move(messages)]() mutable {
    Rank& done = ranks_[r];
    done.busy = false;
    send(r, bucket, std::move(messages));
    while (done.bucket < done.started && done.exchanges[done.bucket]->done()) {
      now_.seconds = std::max(now_.seconds, clock_.now() - began_);
      now_.longest_way = std::max(now_.longest_way, done.ways[done.bucket]);
      ++done.bucket;
    }
    work(r);
  });
}

void RunningSimulation::send(uint32_t r, uint32_t bucket, std::vector<OutgoingMessage> messages) {
  for (OutgoingMessage& message : messages) {
    const uint32_t to = message.peer;
    const uint64_t bytes = message.bytes.size();
    RankTraffic& traffic = now_.traffic[r];
    ++traffic.messages_sent;
    if (links_.is_local(r, to)) {
      traffic.local_bytes_sent += bytes;
    } else {
      traffic.bytes_sent += bytes;
      now_.traffic[to].bytes_received += bytes;
    }
    links_.send(
        r, to, bytes,
        [this, to, letter = Letter{r, bucket, ranks_[r].ways[bucket] + 1, std::move(message)}] {
          arrive(to, letter);
        });
  }
}

void RunningSimulation::arrive(uint32_t r, Letter letter) {
  ranks_[r].mailbox.push_back(std::move(letter));
  work(r);
}

Status RunningSimulation::check_end() const {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    if (rank.bucket == options_.buckets.size()) continue;
    const std::vector<uint32_t> awaited = rank.exchanges[rank.bucket]->awaiting();
    return {StatusCode::kTruncated,
            "rank " + std::to_string(r) + " still waits" +
                (awaited.empty() ? "" : " for rank " + std::to_string(awaited.front()))};
  }
  return {};
}

Status check(const SimulationOptions& options) {
  const NetworkModel& network = options.network;
  const auto refuse = [](const char* why) { return Status(StatusCode::kInvalidArgument, why); };
  if (options.ranks == 0) return refuse("a simulation needs ranks");
  if (options.buckets.empty()) return refuse("a simulation needs buckets");
  if (options.values.empty()) return refuse("a simulation needs values to fill the buckets with");
  if (!(network.bits_per_second > 0) || !(network.local_bits_per_second > 0)) {
    return refuse("the bandwidth of a link must be above 0");
  }
  if (!(network.latency >= 0) || !std::isfinite(network.latency)) {
    return refuse("the latency must be 0 or more");
  }
  if (!(options.pause >= 0) || !std::isfinite(options.pause)) {
    return refuse("the pause between steps must be 0 or more");
  }
  if (network.ranks_per_machine == 0 || network.turn_bytes == 0 || network.payload_bytes == 0) {
    return refuse("a machine needs ranks, and a frame and a turn need bytes");
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Simulation>> Simulation::create(SimulationOptions options) {
  GW_RETURN_IF_ERROR(check(options));
  GW_ASSIGN_OR_RETURN(options.network.ranks_alone, servers_of(options));
  GW_RETURN_IF_ERROR(check_layouts(options));
  auto simulation = std::make_unique<RunningSimulation>(std::move(options));
  GW_RETURN_IF_ERROR(simulation->make_ranks());
  return std::unique_ptr<Simulation>(std::move(simulation));
}

}  // namespace gradwire
