#include "engines/simulated/links.h"

#include <algorithm>
#include <utility>

namespace gradwire {
namespace {

uint64_t connection(uint32_t source, uint32_t target) { return uint64_t{source} << 32 | target; }

}  // namespace

Links::Links(const NetworkModel& model, uint32_t ranks, EventClock& clock)
    : ranks_per_machine_(model.ranks_per_machine),
      ranks_alone_(model.ranks_alone),
      first_alone_(ranks - model.ranks_alone),
      turn_bytes_(model.turn_bytes),
      payload_bytes_(model.payload_bytes),
      header_bytes_(model.header_bytes),
      machines_((first_alone_ + model.ranks_per_machine - 1) / model.ranks_per_machine +
                ranks_alone_),
      clock_(clock) {
  const double seconds_per_byte = 8 / model.bits_per_second;
  const Port link = {.seconds_per_byte = seconds_per_byte,
                     .burst_seconds = static_cast<double>(model.burst_bytes) * seconds_per_byte,
                     .latency = model.latency,
                     .waiting = {}};
  const Port local = {.seconds_per_byte = 8 / model.local_bits_per_second,
                      .burst_seconds = 0,
                      .latency = 0,
                      .waiting = {}};
  ports_.assign(machines_, link);
  ports_.insert(ports_.end(), ranks, local);
}

void Links::send(uint32_t source, uint32_t target, uint64_t bytes, EventClock::Action arrived) {
  if (!is_local(source, target)) {
    const uint64_t frames = std::max<uint64_t>(1, (bytes + payload_bytes_ - 1) / payload_bytes_);
    bytes += frames * header_bytes_;
  }
  const uint32_t id = store({.source = source,
                             .target = target,
                             .left = bytes,
                             .next = kNone,
                             .arrived = std::move(arrived)});
  const auto [last, idle] = last_.try_emplace(connection(source, target), id);
  if (!idle) {
    messages_[std::exchange(last->second, id)].next = id;
    return;
  }
  Port& port = port_of(source, messages_[id]);
  port.waiting.push_back(id);
  if (!port.sends) send_next(port);
}

Links::Port& Links::port_of(uint32_t rank, const Message& message) {
  return ports_[is_local(message.source, message.target) ? machines_ + rank : machine_of(rank)];
}

uint32_t Links::store(Message message) {
  if (unused_.empty()) {
    messages_.push_back(std::move(message));
    return static_cast<uint32_t>(messages_.size() - 1);
  }
  const uint32_t id = unused_.back();
  unused_.pop_back();
  messages_[id] = std::move(message);
  return id;
}

void Links::send_next(Port& port) {
  port.sends = !port.waiting.empty();
  if (!port.sends) return;
  const uint32_t id = port.waiting.front();
  port.waiting.pop_front();
  const auto part = static_cast<uint32_t>(std::min<uint64_t>(messages_[id].left, turn_bytes_));
  messages_[id].left -= part;
  const double now = clock_.now();
  const double seconds = part * port.seconds_per_byte;
  port.send_full_at = std::max(port.send_full_at, now) + seconds;
  const double end = std::max(now, port.send_full_at - port.burst_seconds);
  clock_.at(end, [this, id, part, steady_end = now + seconds] { end_part(id, part, steady_end); });
}

void Links::end_part(uint32_t id, uint32_t bytes, double steady_end) {
  const Message& message = messages_[id];
  Port& sender = port_of(message.source, message);
  Port& receiver = port_of(message.target, message);
  // The sender's tokens let the first bytes pass at once, and all others at the link's rate. So the
  // receiver's bucket fills no more from the first byte to the last.
  receiver.receive_full_at = std::max(steady_end + sender.latency,
                                      receiver.receive_full_at + bytes * receiver.seconds_per_byte);
  const double received =
      std::max(clock_.now() + sender.latency, receiver.receive_full_at - receiver.burst_seconds);
  if (message.left > 0) {
    sender.waiting.push_back(id);
  } else {
    end_message(id);
    clock_.at(received, [this, id] {
      const EventClock::Action arrived = std::move(messages_[id].arrived);
      unused_.push_back(id);
      arrived();
    });
  }
  send_next(sender);
}

// Lets the connection's next message take its turn.
void Links::end_message(uint32_t id) {
  const Message& message = messages_[id];
  if (message.next == kNone) {
    last_.erase(connection(message.source, message.target));
  } else {
    port_of(message.source, message).waiting.push_back(message.next);
  }
}

}  // namespace gradwire
