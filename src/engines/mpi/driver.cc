#include "engines/mpi/driver.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/return_if_error.h"

namespace gradwire::mpi {
namespace {

// In front of the reason of a rank that can't take part; no description begins so.
constexpr std::string_view kRefusal = "refused: ";

// A waiting rank looks this often before it leaves the processor to others.
constexpr int kBusyLooks = 200;
constexpr std::chrono::microseconds kPause(20);

// MPI can't take back a send that nobody receives: its memory stays until the process ends.
void keep_for_ever(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace

Engine::Driver::Driver(std::shared_ptr<Communicator> communicator,
                       std::unique_ptr<Exchange> exchange, double timeout_seconds,
                       std::string_view preface)
    : communicator_(std::move(communicator)),
      held_(std::make_shared<Held>(
          Held{.wire = Wire(*communicator_, communicator_->take_tags(), timeout_seconds),
               .exchange = std::move(exchange),
               .description = std::string(preface)})),
      listening_(held_->exchange->listening()),
      descriptions_(communicator_->size()) {
  held_->description += held_->exchange->describe();
}

Engine::Driver::~Driver() {
  if (held_->wire.in_use())
    keep_for_ever(std::make_shared<std::pair<std::shared_ptr<Communicator>, std::shared_ptr<Held>>>(
        communicator_, held_));
}

Status Engine::Driver::start(std::span<float> bucket, uint64_t step) {
  GW_RETURN_IF_ERROR(check_running());
  if (state_ == State::kFailed) return failure_;
  if (state_ != State::kIdle) {
    return {StatusCode::kUnexpectedMessage, "start: the step before has not ended"};
  }
  if (bucket.size() != exchange().layout().numel()) {
    return {StatusCode::kLengthMismatch,
            "start: the layout has " + std::to_string(exchange().layout().numel()) +
                " values, the bucket " + std::to_string(bucket.size())};
  }
  if (over_ || left_) {
    return {StatusCode::kUnexpectedMessage, "start: no step is made any more, as over() says"};
  }
  bucket_ = bucket;
  step_ = step;
  if (agreed_) {
    failure_ = start_exchange();
  } else {
    state_ = State::kComparing;
    for (uint32_t peer = 0; peer < communicator_->size() && failure_.ok(); ++peer) {
      if (peer == communicator_->rank()) continue;
      failure_ = held_->wire.send(peer, std::as_bytes(std::span(held_->description)));
    }
  }
  if (!failure_.ok()) state_ = State::kFailed;
  return failure_;
}

Status Engine::Driver::start_exchange() {
  state_ = State::kExchanging;
  GW_RETURN_IF_ERROR(exchange().start(bucket_, step_));
  return send_outgoing();
}

Status Engine::Driver::send_outgoing() {
  for (const OutgoingMessage& message : exchange().take_outgoing()) {
    GW_RETURN_IF_ERROR(held_->wire.send(message.peer, message.bytes, message.keep));
  }
  return {};
}

Result<bool> Engine::Driver::test() {
  Result<bool> moved = advance();
  if (!moved.ok()) return moved.status();
  return state_ == State::kIdle;
}

Status Engine::Driver::wait() {
  for (int idle_looks = 0;;) {
    Result<bool> moved = advance();
    if (!moved.ok()) return moved.status();
    if (state_ == State::kIdle) return {};
    idle_looks = moved.value() ? 0 : idle_looks + 1;
    if (idle_looks > kBusyLooks) std::this_thread::sleep_for(kPause);
  }
}

Result<bool> Engine::Driver::advance() {
  Result<bool> moved = false;
  switch (state_) {
    case State::kIdle:
      if (agreed_ && !listening_.empty() && !left_) moved = take({}, false);
      break;
    case State::kComparing:
      moved = compare();
      break;
    case State::kExchanging:
      moved = exchange_packets();
      break;
    case State::kFlushing:
      moved = held_->wire.poll({.awaited = {}}, {});
      break;
    case State::kFailed:
      return failure_;
  }
  if (!moved.ok()) {
    failure_ = moved.status();
    state_ = State::kFailed;
    return moved;
  }
  if (state_ == State::kFlushing && !held_->wire.sends_pending()) state_ = State::kIdle;
  return moved;
}

Result<bool> Engine::Driver::compare() {
  const std::vector<uint32_t> awaited = ranks_not_heard();
  Result<bool> moved =
      held_->wire.poll({.awaited = awaited}, [&](uint32_t peer, std::span<const std::byte> text) {
        descriptions_[peer] = std::string(reinterpret_cast<const char*>(text.data()), text.size());
        return Status();
      });
  // A peer that differs must get to know it before this rank stops.
  if (!moved.ok() || !ranks_not_heard().empty() || held_->wire.sends_pending()) return moved;
  GW_RETURN_IF_ERROR(find_difference());
  agreed_ = true;
  descriptions_.clear();
  GW_RETURN_IF_ERROR(start_exchange());
  if (exchange().done() && listening_.empty()) state_ = State::kFlushing;
  return true;
}

std::vector<uint32_t> Engine::Driver::ranks_not_heard() const {
  std::vector<uint32_t> ranks;
  for (uint32_t peer = 0; peer < communicator_->size(); ++peer) {
    if (peer != communicator_->rank() && !descriptions_[peer]) ranks.push_back(peer);
  }
  return ranks;
}

Status Engine::Driver::find_difference() const {
  for (uint32_t peer = 0; peer < communicator_->size(); ++peer) {
    if (peer == communicator_->rank()) continue;
    const std::string& other = *descriptions_[peer];
    if (other.starts_with(kRefusal)) {
      return {StatusCode::kPeerMismatch, "rank " + std::to_string(peer) +
                                             " can't take part: " + other.substr(kRefusal.size())};
    }
    GW_RETURN_IF_ERROR(
        compare_descriptions(communicator_->rank(), held_->description, peer, other));
  }
  return {};
}

Result<bool> Engine::Driver::exchange_packets() {
  if (exchange().done()) {
    // What else has come is taken at once: a late push wants its answer, a stale model its
    // versions.
    Result<bool> more = listening_.empty() ? false : take({}, false);
    if (more.ok() && !more.value()) state_ = State::kFlushing;
    return more;
  }
  if (!listening_.empty()) {
    GW_RETURN_IF_ERROR(find_end());
    if (state_ != State::kExchanging) return true;
  }
  std::vector<uint32_t> awaited = exchange().awaiting();
  std::erase_if(awaited, [&](uint32_t peer) {
    return peer < communicator_->size() && held_->wire.heard(peer, Wire::News::kLeft);
  });
  return take(awaited, exchange().awaits_any());
}

Result<bool> Engine::Driver::take(std::span<const uint32_t> awaited, bool any, bool flushing) {
  return held_->wire.poll(
      {.awaited = awaited, .any = any, .listening = listening_, .flushing = flushing},
      [&](uint32_t peer, std::span<const std::byte> message) {
        GW_RETURN_IF_ERROR(exchange().receive(peer, message));
        return send_outgoing();
      });
}

std::vector<uint32_t> Engine::Driver::ranks_there() const {
  std::vector<uint32_t> there = listening_;
  std::erase_if(there, [&](uint32_t peer) { return held_->wire.heard(peer, Wire::News::kLeft); });
  return there;
}

Status Engine::Driver::find_end() {
  GW_RETURN_IF_ERROR(held_->wire.take_news());
  const std::vector<uint32_t> awaited = exchange().awaiting();
  const auto is_gone = [&](uint32_t peer) {
    return peer < communicator_->size() && (held_->wire.heard(peer, Wire::News::kLeft) ||
                                            held_->wire.heard(peer, Wire::News::kOver));
  };
  // A server needs some of those it waits for, a worker all.
  over_ = exchange().awaits_any() ? std::all_of(awaited.begin(), awaited.end(), is_gone)
                                  : std::any_of(awaited.begin(), awaited.end(), is_gone);
  if (over_) state_ = State::kIdle;
  return {};
}

// Whether anything moved; the end is `left_`.
Result<bool> Engine::Driver::run_out() {
  GW_RETURN_IF_ERROR(held_->wire.take_news());
  const std::vector<uint32_t> there = ranks_there();
  if (there.empty() && exchange().awaits_any() && !told_left_) {
    for (uint32_t peer : listening_) {
      GW_RETURN_IF_ERROR(held_->wire.tell(peer, Wire::News::kLeft));
    }
    told_left_ = true;
  }
  left_ = there.empty() && !held_->wire.any_sends_pending();
  return left_ ? true : take(there, false, there.empty());
}

Status Engine::Driver::leave() {
  if (state_ == State::kFailed) return failure_;
  if (state_ != State::kIdle) {
    return {StatusCode::kUnexpectedMessage, "leave: a step is under way"};
  }
  if (listening_.empty() || !agreed_ || left_) return {};
  const bool server = exchange().awaits_any();
  for (uint32_t peer : listening_) {
    failure_ = held_->wire.tell(peer, server ? Wire::News::kOver : Wire::News::kLeft);
    if (!failure_.ok()) break;
  }
  told_left_ = !server;
  for (int idle_looks = 0; failure_.ok() && !left_;) {
    const Result<bool> moved = run_out();
    failure_ = moved.status();
    idle_looks = moved.ok() && moved.value() ? 0 : idle_looks + 1;
    if (idle_looks > kBusyLooks) std::this_thread::sleep_for(kPause);
  }
  if (!failure_.ok()) state_ = State::kFailed;
  return failure_;
}

Engine::Engine(std::unique_ptr<Driver> driver) : driver_(std::move(driver)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

Result<Engine> Engine::create(MPI_Comm comm, std::unique_ptr<Exchange> exchange,
                              double timeout_seconds, std::string_view preface) {
  Result<std::shared_ptr<Communicator>> attached = Communicator::attach(comm);
  if (!attached.ok()) return attached.status();
  const std::shared_ptr<Communicator>& communicator = attached.value();
  if (!(timeout_seconds > 0)) {
    return Status(StatusCode::kInvalidArgument,
                  "the timeout must be above 0 seconds, got " + std::to_string(timeout_seconds));
  }
  return Engine(
      std::make_unique<Driver>(communicator, std::move(exchange), timeout_seconds, preface));
}

Status Engine::refuse(MPI_Comm comm, Status reason) {
  Result<std::shared_ptr<Communicator>> attached = Communicator::attach(comm);
  if (!attached.ok()) return reason;
  struct Held {
    std::shared_ptr<Communicator> communicator;
    Wire wire;
    std::string text;
  };
  const std::shared_ptr<Communicator>& communicator = attached.value();
  const auto held = std::make_shared<Held>(
      Held{.communicator = communicator,
           .wire = Wire(*communicator, communicator->take_tags(), kDefaultTimeout),
           .text = std::string(kRefusal) + reason.message()});
  for (uint32_t peer = 0; peer < communicator->size(); ++peer) {
    if (peer == communicator->rank()) continue;
    // Whoever can't be reached will find this rank silent.
    if (!held->wire.send(peer, std::as_bytes(std::span(held->text))).ok()) break;
  }
  if (held->wire.sends_pending() && !held->wire.poll({.awaited = {}}, {}).ok()) return reason;
  if (held->wire.in_use()) keep_for_ever(held);
  return reason;
}

Status Engine::start(std::span<float> bucket, uint64_t step) {
  return driver_->start(bucket, step);
}
Result<bool> Engine::test() { return driver_->test(); }
Status Engine::leave() { return driver_->leave(); }
bool Engine::over() const noexcept { return driver_->over(); }
Status Engine::wait() { return driver_->wait(); }
Exchange& Engine::exchange() noexcept { return driver_->exchange(); }
uint64_t Engine::bytes_sent() const noexcept { return driver_->wire().bytes_sent(); }
uint64_t Engine::bytes_received() const noexcept { return driver_->wire().bytes_received(); }

}  // namespace gradwire::mpi
