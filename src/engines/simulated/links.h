#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <unordered_map>
#include <vector>

#include "engines/simulated/event_clock.h"

namespace gradwire {

// A network in which each machine has a full-duplex link to a switch without limits.
struct NetworkModel {
  double bits_per_second = std::numeric_limits<double>::infinity();  // of a link, each way
  double latency = 0;                                                // seconds between machines
  uint32_t ranks_per_machine = 1;  // consecutive ranks, which share the machine's link
  uint32_t ranks_alone = 0;        // the last ranks, each on a machine of its own: the servers
  // Messages between ranks of one machine take no part of its link. Each rank sends and receives
  // them at this rate, without latency.
  double local_bits_per_second = std::numeric_limits<double>::infinity();
  // The connections of a link take turns after so many bytes, as under a fair queue.
  uint32_t turn_bytes = 65536;
  // A frame carries so many bytes of a message, and so many of headers (TCP with time stamps over
  // IPv4 over Ethernet). Local messages have no headers.
  uint32_t payload_bytes = 1448;
  uint32_t header_bytes = 66;
  // Each end of a link has a token bucket for what it sends and one for what it receives: so many
  // bytes, headers included, pass at once. It fills at bits_per_second. Local messages have none.
  uint64_t burst_bytes = 0;
};

// The links of all machines, as message after message takes its time on them.
//
// A link sends the messages of one connection one after the other, and parts of turn_bytes of all
// its connections in turn. A part that has left its sender comes to the receiver's link after the
// latency, and that link takes the parts in the order in which they come. It takes a part while it
// arrives: a message of b bytes, headers included, over idle links takes latency +
// max(0, b - burst_bytes) * 8 / bits_per_second. No part is lost, so nothing is sent twice.
class Links {
 public:
  // `clock` outlives the links.
  Links(const NetworkModel& model, uint32_t ranks, EventClock& clock);

  // Sends a message now. `arrived` runs when its last byte has come.
  void send(uint32_t source, uint32_t target, uint64_t bytes, EventClock::Action arrived);

  [[nodiscard]] uint32_t machine_of(uint32_t rank) const {
    return rank < first_alone_ ? rank / ranks_per_machine_
                               : machines_ - ranks_alone_ + (rank - first_alone_);
  }
  [[nodiscard]] bool is_local(uint32_t source, uint32_t target) const {
    return machine_of(source) == machine_of(target);
  }

 private:
  static constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

  struct Message {
    uint32_t source;
    uint32_t target;
    uint64_t left;  // bytes that have not left the sender
    uint32_t next;  // the next message of the connection; kNone: there is none yet
    EventClock::Action arrived;
  };
  // One end of a link, or a rank's end of the way between ranks of its machine. Its buckets are
  // told by the time at which they are full again; bytes put that off. They wait until it is no
  // more than burst_seconds ahead, the time that an empty bucket takes to fill.
  struct Port {
    double seconds_per_byte;
    double burst_seconds;
    double latency;
    std::deque<uint32_t> waiting;  // messages, in turn; at most one of each connection
    bool sends = false;
    double send_full_at = 0;
    double receive_full_at = 0;
  };

  [[nodiscard]] Port& port_of(uint32_t rank, const Message& message);
  uint32_t store(Message message);
  void send_next(Port& port);
  // The sender has sent a part. steady_end: when it would have without tokens.
  void end_part(uint32_t id, uint32_t bytes, double steady_end);
  void end_message(uint32_t id);

  uint32_t ranks_per_machine_;
  uint32_t ranks_alone_;
  uint32_t first_alone_;
  uint32_t turn_bytes_;
  uint32_t payload_bytes_;
  uint32_t header_bytes_;
  uint32_t machines_;
  EventClock& clock_;
  std::vector<Port> ports_;  // of each machine, then of each rank
  std::vector<Message> messages_;
  std::vector<uint32_t> unused_;                 // places in messages_
  std::unordered_map<uint64_t, uint32_t> last_;  // the last message of each busy connection
};

}  // namespace gradwire
