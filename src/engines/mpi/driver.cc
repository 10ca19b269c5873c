#include "engines/mpi/driver.h"

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
      descriptions_(communicator_->size()) {
  held_->description += held_->exchange->describe();
}

Engine::Driver::~Driver() {
  if (held_->wire.in_use())
    keep_for_ever(std::make_shared<std::pair<std::shared_ptr<Communicator>, std::shared_ptr<Held>>>(
        communicator_, held_));
}

Status Engine::Driver::start(std::span<float> bucket, uint64_t step) {
  if (state_ == State::kFailed) return failure_;
  if (state_ != State::kIdle) {
    return {StatusCode::kUnexpectedMessage, "start: the step before has not ended"};
  }
  if (bucket.size() != exchange().layout().numel()) {
    return {StatusCode::kLengthMismatch,
            "start: the layout has " + std::to_string(exchange().layout().numel()) +
                " values, the bucket " + std::to_string(bucket.size())};
  }
  bucket_ = bucket;
  step_ = step;
  ++round_;
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
    GW_RETURN_IF_ERROR(held_->wire.send(message.peer, message.bytes));
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
      break;
    case State::kComparing:
      moved = compare();
      break;
    case State::kExchanging:
      moved = exchange_packets();
      break;
    case State::kFlushing:
      moved = held_->wire.poll({}, round_, {});
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
      held_->wire.poll(awaited, round_, [&](uint32_t peer, std::span<const std::byte> text) {
        descriptions_[peer] = std::string(reinterpret_cast<const char*>(text.data()), text.size());
        return Status();
      });
  // A peer that differs must get to know it before this rank stops.
  if (!moved.ok() || !ranks_not_heard().empty() || held_->wire.sends_pending()) return moved;
  GW_RETURN_IF_ERROR(find_difference());
  agreed_ = true;
  descriptions_.clear();
  GW_RETURN_IF_ERROR(start_exchange());
  if (exchange().done()) state_ = State::kFlushing;
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
  const auto receive = [&](uint32_t peer, std::span<const std::byte> message) {
    GW_RETURN_IF_ERROR(exchange().receive(peer, message));
    return send_outgoing();
  };
  if (exchange().done()) {
    state_ = State::kFlushing;
    return true;
  }
  return held_->wire.poll(exchange().awaiting(), round_, receive);
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
  if (held->wire.sends_pending() && !held->wire.poll({}, 0, {}).ok()) return reason;
  if (held->wire.in_use()) keep_for_ever(held);
  return reason;
}

Status Engine::start(std::span<float> bucket, uint64_t step) {
  return driver_->start(bucket, step);
}
Result<bool> Engine::test() { return driver_->test(); }
Status Engine::wait() { return driver_->wait(); }
Exchange& Engine::exchange() noexcept { return driver_->exchange(); }
uint64_t Engine::bytes_sent() const noexcept { return driver_->wire().bytes_sent(); }
uint64_t Engine::bytes_received() const noexcept { return driver_->wire().bytes_received(); }

}  // namespace gradwire::mpi
