#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engines/simulated/charged_codec.h"
#include "engines/simulated/links.h"
#include "gradwire/exchange.h"
#include "gradwire/layout.h"
#include "gradwire/status.h"

namespace gradwire {

// A bucket of gradients, which each rank has at `ready` seconds after the step began. The layout is
// the one that make_exchange wants.
struct SimulatedBucket {
  std::shared_ptr<const Layout> layout;
  double ready = 0;
};

struct SimulationOptions {
  // As make_exchange takes it. Workers and dedicated servers (gradwire/server.h) run in lockstep,
  // without backup workers and staleness (kInvalidArgument). Every server has a machine of its own.
  // With "server" the averages are the change of a server's model, as SGD has it without momentum;
  // an optimizer's other changes may take other bytes in the pulls.
  std::string exchange = "sharded";
  uint32_t ranks = 2;                    // with the servers
  std::vector<SimulatedBucket> buckets;  // in the order in which they are exchanged
  // The gradients: buckets are filled with these values, over and over. Not empty, finite. Rank r
  // begins step s at values[(r + s * R) * stride], with R ranks that have gradients (servers have
  // none): the default, a prime, seldom gives two ranks the same values; the number of values of
  // all buckets takes recorded gradients in their order.
  std::span<const float> values;
  uint64_t stride = 104'729;
  NetworkModel network;
  CostOfCodec cost;        // empty: codecs take no time
  double per_message = 0;  // seconds of CPU for each message, of its sender and of its receiver
  double pause = 0;        // seconds from the end of a step to the next, in which links are idle
  uint64_t seed = 0;       // of the codecs' draws
  // Called about every tenth of a second while ranks are made and a step runs; empty: never. If it
  // throws, the exception leaves create() or step(), and the simulation takes no further step.
  std::function<void()> look_up;
};

// The messages of one rank in one step. Bytes are those of the packets, without headers of frames.
struct RankTraffic {
  uint64_t messages_sent = 0;  // to all ranks
  uint64_t bytes_sent = 0;     // to other machines
  uint64_t bytes_received = 0;
  uint64_t local_bytes_sent = 0;  // to ranks of the same machine
};

struct SimulatedStep {
  double seconds = 0;        // until the last rank has the last bucket
  double codec_seconds = 0;  // the largest sum of any rank
  uint32_t longest_way = 0;  // of any bucket: messages, each sent after the one before had come
  std::vector<RankTraffic> traffic;  // of each rank
};

// Runs the exchanges of all ranks in this process, on the clock of a simulated network. Each rank
// has one thread for its messages: it encodes, decodes and sends one bucket after the other, as the
// communication thread of the DDP hook does, and starts the next one while it waits. Every step
// begins on all ranks at once. The bytes are those of any other engine.
class Simulation {
 public:
  // kInvalidArgument: no ranks, buckets or values; the statuses of make_exchange.
  static Result<std::unique_ptr<Simulation>> create(SimulationOptions options);
  virtual ~Simulation() = default;

  // The next step; residuals grow from step to step. Returns the first failure of any rank, and
  // kTruncated naming a rank that waits for a message which never comes; kInvalidArgument after a
  // step that `look_up` has ended.
  virtual Result<SimulatedStep> step() = 0;
  // The counters of a rank, of all buckets: values and bytes since the simulation was made.
  [[nodiscard]] virtual std::vector<ExchangeStats> stats(uint32_t rank) const = 0;
};

}  // namespace gradwire
