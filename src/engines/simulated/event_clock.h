#pragma once

#include <cassert>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace gradwire {

// The clock of a discrete-event simulation. It jumps from one action to the next; actions at the
// same time run in the order in which they were added, so a simulation is repeatable.
class EventClock {
 public:
  using Action = std::function<void()>;

  // Seconds since the simulation began.
  [[nodiscard]] double now() const noexcept { return now_; }

  // Runs `action` at `time`, which is not before now().
  void at(double time, Action action) {
    assert(time >= now_);
    events_.push({.time = time, .number = next_++, .action = std::move(action)});
  }

  // Jumps to the next action and runs it. false: there is none.
  bool run_next() {
    if (events_.empty()) return false;
    now_ = events_.top().time;
    const Action action = std::move(events_.top().action);
    events_.pop();
    action();
    return true;
  }

 private:
  struct Event {
    double time;
    uint64_t number;
    mutable Action action;  // no part of the order, so it may be moved out of the queue
    bool operator<(const Event& other) const {  // the queue gives the largest event first
      return time != other.time ? time > other.time : number > other.number;
    }
  };

  double now_ = 0;
  uint64_t next_ = 0;
  std::priority_queue<Event> events_;
};

}  // namespace gradwire
