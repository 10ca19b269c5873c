#include "engines/simulated/simulation.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "base/return_if_error.h"
#include "engines/simulated/event_clock.h"
#include "exchange/steps/exchange_entry.h"
#include "exchange/steps/server_packets.h"
#include "gradwire/exchange_choice.h"

namespace gradwire {
namespace {

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
  std::deque<Letter> mailbox;
  uint32_t bucket = 0;   // the bucket under way, or the next one
  bool started = false;  // whether it is under way
  bool busy = false;     // whether the thread computes
  uint32_t way = 0;
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

// What workers pull from dedicated servers; nothing for exchanges without servers.
std::optional<ServerOptions::Pulls> pulls_of(const std::string& exchange) {
  if (exchange == "server" || exchange == "server:pulls=updates") {
    return ServerOptions::Pulls::kUpdates;
  }
  if (exchange == "server:pulls=gradients") return ServerOptions::Pulls::kGradients;
  return std::nullopt;
}

// A worker's or a server's side. A server that has a model changes it by the averages.
Result<std::unique_ptr<Exchange>> make_side(ExchangeSetup setup, ServerOptions::Pulls pulls) {
  const ServerOptions options = {.pulls = pulls};
  if (setup.rank < setup.layout->workers()) {
    GW_ASSIGN_OR_RETURN(std::unique_ptr<WorkerSide> worker, make_server_worker(setup, options, {}));
    return std::unique_ptr<Exchange>(std::move(worker));
  }
  if (pulls == ServerOptions::Pulls::kUpdates) {
    setup.options.update = [](std::span<float>) { return Status(); };
  }
  GW_ASSIGN_OR_RETURN(std::unique_ptr<ServerSide> server, make_server(std::move(setup), options));
  return std::unique_ptr<Exchange>(std::move(server));
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
  [[nodiscard]] Status check_layouts(uint32_t owners, uint32_t servers) const;
  Result<std::vector<uint32_t>> machines_of_ranks(const ExchangeChoice& choice) const;
  void begin_step(uint32_t r);
  // Lets a rank that does not compute do what it can: begin a bucket, or take a message.
  void work(uint32_t r);
  // Hands over the first message that is awaited. false: there is none.
  bool take_letter(Rank& rank, Status& status);
  // After a call that took `letters` messages: charges its time, then sends its messages.
  void finish_call(uint32_t r, uint32_t letters, const Status& status);
  void send(uint32_t r, uint32_t bucket, std::vector<OutgoingMessage> messages);
  void arrive(uint32_t r, Letter letter);
  [[nodiscard]] Status check_end() const;

  SimulationOptions options_;
  EventClock clock_;
  Links links_;
  std::vector<Rank> ranks_;
  double charged_ = 0;  // by the codecs, in the call under way
  uint64_t step_ = 0;
  double began_ = 0;  // the time when the step began
  SimulatedStep now_;
  Status failure_;
};

Status RunningSimulation::check_layouts(uint32_t owners, uint32_t servers) const {
  for (const SimulatedBucket& bucket : options_.buckets) {
    const Layout& layout = *bucket.layout;
    if (layout.world_size() != owners) {
      return {StatusCode::kInvalidArgument,
              "the layout is of " + std::to_string(layout.world_size()) +
                  " ranks or machines, the simulation of " + std::to_string(owners)};
    }
    if (layout.servers() != servers) {
      return {StatusCode::kInvalidArgument, "the layout has " + std::to_string(layout.servers()) +
                                                " servers, the exchange " + options_.exchange +
                                                " of this simulation " + std::to_string(servers)};
    }
  }
  return {};
}

// For exchanges between machines; empty for others. Checks that the layouts fit.
Result<std::vector<uint32_t>> RunningSimulation::machines_of_ranks(
    const ExchangeChoice& choice) const {
  const bool between = choice.info().between_machines;
  std::vector<uint32_t> machines;
  for (uint32_t r = 0; between && r < ranks_.size(); ++r) machines.push_back(links_.machine_of(r));
  GW_RETURN_IF_ERROR(check_layouts(between ? machines.back() + 1 : options_.ranks, 0));
  if (const uint32_t size = choice.ranks_per_machine(); size != 0) {
    if (size != options_.network.ranks_per_machine) {
      return Status(StatusCode::kInvalidArgument,
                    options_.exchange + " on machines of " +
                        std::to_string(options_.network.ranks_per_machine) + " ranks");
    }
    machines.clear();  // the exchange knows them
  }
  return machines;
}

Status RunningSimulation::make_ranks() {
  GW_ASSIGN_OR_RETURN(Execution execution, Execution::create());
  const ShardCodecFactory codecs = charge(host_shard_codecs(std::move(execution)),
                                          remember(std::move(options_.cost)), &charged_);
  const std::optional<ServerOptions::Pulls> pulls = pulls_of(options_.exchange);
  std::vector<uint32_t> machines;
  if (pulls) {
    GW_RETURN_IF_ERROR(check_layouts(options_.ranks, options_.network.ranks_alone));
  } else {
    GW_ASSIGN_OR_RETURN(const ExchangeChoice choice, ExchangeChoice::parse(options_.exchange));
    GW_ASSIGN_OR_RETURN(machines, machines_of_ranks(choice));
  }
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    for (const SimulatedBucket& bucket : options_.buckets) {
      ExchangeSetup setup = {.layout = bucket.layout, .rank = r, .codecs = codecs, .options = {}};
      setup.options.seed = options_.seed;
      setup.options.machine_of_rank = machines;
      GW_ASSIGN_OR_RETURN(std::unique_ptr<Exchange> exchange,
                          pulls ? make_side(std::move(setup), *pulls)
                                : make_exchange(options_.exchange, std::move(setup)));
      ranks_[r].exchanges.push_back(std::move(exchange));
      ranks_[r].values.emplace_back(bucket.layout->numel());
    }
  }
  return {};
}

Result<SimulatedStep> RunningSimulation::step() {
  now_ = SimulatedStep();
  now_.traffic.resize(ranks_.size());
  began_ = clock_.now();
  for (uint32_t r = 0; r < ranks_.size(); ++r) begin_step(r);
  while (failure_.ok() && clock_.run_next()) {
  }
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
  rank.way = 0;
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
  if (rank.started) {
    if (take_letter(rank, status)) finish_call(r, 1, status);
  } else if (clock_.now() >= began_ + options_.buckets[rank.bucket].ready) {
    rank.started = true;
    status = rank.exchanges[rank.bucket]->start(rank.values[rank.bucket], step_);
    finish_call(r, 0, status);
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
  rank.way = std::max(rank.way, letter.way);
  status = exchange.check_size(letter.source, letter.message.bytes.size());
  if (status.ok()) status = exchange.receive(letter.source, letter.message.bytes);
  return true;
}

void RunningSimulation::finish_call(uint32_t r, uint32_t letters, const Status& status) {
  if (!status.ok()) {
    failure_ = status;
    return;
  }
  Rank& rank = ranks_[r];
  std::vector<OutgoingMessage> messages = rank.exchanges[rank.bucket]->take_outgoing();
  const double count = letters + static_cast<double>(messages.size());
  rank.codec_seconds += charged_;
  rank.busy = true;
  const double end = clock_.now() + charged_ + count * options_.per_message;
  clock_.at(end, [this, r, messages = std::move(messages)]() mutable {
    Rank& done = ranks_[r];
    done.busy = false;
    send(r, done.bucket, std::move(messages));
    if (done.exchanges[done.bucket]->done()) {
      now_.seconds = std::max(now_.seconds, clock_.now() - began_);
      now_.longest_way = std::max(now_.longest_way, done.way);
      done.started = false;
      done.way = 0;
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
    links_.send(r, to, bytes,
                [this, to, letter = Letter{r, bucket, ranks_[r].way + 1, std::move(message)}] {
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
  if (pulls_of(options.exchange) && options.buckets[0].layout->servers() == 0) {
    return refuse("workers and servers need layouts with servers");
  }
  if (options.values.empty()) return refuse("a simulation needs values to fill the buckets with");
  if (!(network.bits_per_second > 0) || !(network.local_bits_per_second > 0)) {
    return refuse("the bandwidth of a link must be above 0");
  }
  if (!(network.latency >= 0) || !std::isfinite(network.latency)) {
    return refuse("the latency must be 0 or more");
  }
  if (network.ranks_per_machine == 0 || network.turn_bytes == 0 || network.payload_bytes == 0) {
    return refuse("a machine needs ranks, and a frame and a turn need bytes");
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Simulation>> Simulation::create(SimulationOptions options) {
  GW_RETURN_IF_ERROR(check(options));
  options.network.ranks_alone =
      pulls_of(options.exchange) ? options.buckets[0].layout->servers() : 0;
  if (options.network.ranks_alone >= options.ranks) {
    return Status(StatusCode::kInvalidArgument, "servers alone: a simulation needs workers, too");
  }
  auto simulation = std::make_unique<RunningSimulation>(std::move(options));
  GW_RETURN_IF_ERROR(simulation->make_ranks());
  return std::unique_ptr<Simulation>(std::move(simulation));
}

}  // namespace gradwire
