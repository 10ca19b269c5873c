// Engine: an exchange driven over a communicator.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/return_if_error.h"
#include "engines/mpi/communicator.h"
#include "engines/mpi/wire.h"
#include "gradwire/mpi.h"

namespace gradwire::mpi {
namespace {

// Precedes the reason why a rank can't take part; no description begins with it.
constexpr std::string_view kRefusal = "refused: ";
// Bytes of a description or a refusal, which name each tensor of a layout.
constexpr uint64_t kMaxDescription = uint64_t{1} << 26;

// A waiting rank polls this often before it sleeps for kPause.
constexpr int kBusyLooks = 200;
constexpr std::chrono::microseconds kPause(20);

// All memory that MPI reads from and writes to.
struct Held {
  Held(std::shared_ptr<Communicator> on, double timeout_seconds, std::string text)
      : communicator(std::move(on)),
        wire(*communicator, communicator->take_tags(), timeout_seconds),
        description(std::move(text)) {}

  Status send_description() {
    for (uint32_t peer = 0; peer < communicator->size(); ++peer) {
      if (peer == communicator->rank()) continue;
      GW_RETURN_IF_ERROR(wire.send(peer, std::as_bytes(std::span(description))));
    }
    return {};
  }

  std::shared_ptr<Communicator> communicator;
  Wire wire;
  std::string description;
  std::unique_ptr<Exchange> exchange = {};
};

// Moves what MPI can move now; returns whether it no longer needs `held`. A refusal takes what
// other ranks say of themselves, so that their sends end, too.
bool is_finished(Held& held) {
  if (!held.wire.in_use()) return true;
  std::vector<uint32_t> others;
  for (uint32_t peer = 0; !held.exchange && peer < held.communicator->size(); ++peer) {
    if (peer != held.communicator->rank()) others.push_back(peer);
  }
  Result<bool> moved = check_running().ok();
  while (moved.ok() && moved.value()) {
    moved = held.wire.poll({.awaited = {}, .listening = others, .max_size = kMaxDescription},
                           [](auto, auto) { return Status(); });
  }
  return !held.wire.in_use();
}

// A send that nobody receives can't be cancelled, so its memory is kept until it has ended.
void release(std::unique_ptr<Held> held) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::unique_ptr<Held>>;
  const std::lock_guard lock(mutex);
  std::erase_if(*kept, [](const auto& earlier) { return is_finished(*earlier); });
  if (!is_finished(*held)) kept->push_back(std::move(held));
}

// Calls move(), which returns whether anything moved, until it fails or is_over().
template <typename Move, typename IsOver>
Status repeat(const Move& move, const IsOver& is_over) {
  for (int idle_looks = 0; !is_over();) {
    GW_ASSIGN_OR_RETURN(const bool moved, move());
    idle_looks = moved ? 0 : idle_looks + 1;
    if (idle_looks > kBusyLooks && !is_over()) std::this_thread::sleep_for(kPause);
  }
  return {};
}

}  // namespace

// The states of an Engine:
//
//   idle -> comparing (before the first step) -> exchanging -> flushing -> idle
//
// Every state but idle may end in `failed`. If each rank runs at its own pace (the exchange listens
// to some ranks), messages are taken in idle, too, and a step may be given up: over_ is set.
class Engine::Driver {
 public:
  Driver(std::shared_ptr<Communicator> communicator, std::unique_ptr<Exchange> exchange,
         double timeout_seconds, std::string_view preface)
      : held_(std::make_unique<Held>(std::move(communicator), timeout_seconds,
                                     std::string(preface) + exchange->describe())),
        listening_(exchange->listening()),
        max_message_size_(exchange->max_message_size()) {
    held_->exchange = std::move(exchange);
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  ~Driver() { release(std::move(held_)); }

  Status start(std::span<float> bucket, uint64_t step);
  Result<bool> test();
  Status wait();
  Status leave();
  [[nodiscard]] bool over() const noexcept { return over_; }

  [[nodiscard]] Exchange& exchange() noexcept { return *held_->exchange; }
  [[nodiscard]] Wire& wire() const noexcept { return held_->wire; }

 private:
  enum class State : uint8_t { kIdle, kComparing, kExchanging, kFlushing, kFailed };

  // Each returns whether anything was sent or received.
  Result<bool> advance();
  Result<bool> compare();
  Result<bool> exchange_packets();
  // Takes one message of the ranks that this rank listens to, and sends the answers to it.
  Result<bool> take(std::span<const uint32_t> awaited, bool any, bool flushing = false);
  // Sets over_ if the step can't be completed because too many ranks have left.
  Status find_end();
  // Takes and answers messages that still arrive; sets left_ when no more can arrive.
  Result<bool> run_out();
  Status send_notices(Wire::Notice notice);
  Status start_exchange();
  Status send_outgoing();
  [[nodiscard]] std::vector<uint32_t> ranks_not_heard() const;
  // Whether a rank that compares has not received this rank's description.
  [[nodiscard]] bool descriptions_pending() const;
  Status find_difference() const;

  [[nodiscard]] uint32_t rank() const { return held_->communicator->rank(); }
  [[nodiscard]] uint32_t size() const { return held_->communicator->size(); }
  // Remembers a failure, after which every call returns it.
  Status keep(Status status);

  std::unique_ptr<Held> held_;
  State state_ = State::kIdle;
  bool agreed_ = false;
  std::vector<uint32_t> listening_;
  uint64_t max_message_size_;
  bool over_ = false;
  bool announced_left_ = false;
  bool left_ = false;
  std::map<uint32_t, std::string> descriptions_;  // of the other ranks
  std::span<float> bucket_;
  uint64_t step_ = 0;
  Status failure_;
};

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
    return {StatusCode::kUnexpectedMessage, "start: there are no more steps, as over() says"};
  }
  bucket_ = bucket;
  step_ = step;
  if (agreed_) return keep(start_exchange());
  state_ = State::kComparing;
  return keep(held_->send_description());
}

Status Engine::Driver::keep(Status status) {
  failure_ = std::move(status);
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
    GW_RETURN_IF_ERROR(wire().send(message.peer, message.bytes, message.keep));
  }
  return {};
}

Result<bool> Engine::Driver::test() {
  GW_RETURN_IF_ERROR(advance().status());
  return state_ == State::kIdle;
}

Status Engine::Driver::wait() {
  GW_RETURN_IF_ERROR(advance().status());  // in idle, too: others may need an answer
  return repeat([&] { return advance(); }, [&] { return state_ == State::kIdle; });
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
      moved = wire().poll({.awaited = {}}, {});
      break;
    case State::kFailed:
      return failure_;
  }
  GW_RETURN_IF_ERROR(keep(moved.status()));
  if (state_ == State::kFlushing && !wire().sends_pending()) state_ = State::kIdle;
  return moved;
}

Result<bool> Engine::Driver::compare() {
  const std::vector<uint32_t> awaited = ranks_not_heard();
  Result<bool> moved = wire().poll({.awaited = awaited, .max_size = kMaxDescription},
                                   [&](uint32_t peer, std::span<const std::byte> text) {
                                     descriptions_[peer] = std::string(
                                         reinterpret_cast<const char*>(text.data()), text.size());
                                     return Status();
                                   });
  // A peer whose description differs must receive this rank's description before this rank stops.
  if (!moved.ok() || !ranks_not_heard().empty() || descriptions_pending()) return moved;
  GW_RETURN_IF_ERROR(find_difference());
  agreed_ = true;
  descriptions_.clear();
  GW_RETURN_IF_ERROR(start_exchange());
  if (exchange().done() && listening_.empty()) state_ = State::kFlushing;
  return true;
}

std::vector<uint32_t> Engine::Driver::ranks_not_heard() const {
  std::vector<uint32_t> ranks;
  for (uint32_t peer = 0; peer < size(); ++peer) {
    if (peer != rank() && !descriptions_.contains(peer)) ranks.push_back(peer);
  }
  return ranks;
}

bool Engine::Driver::descriptions_pending() const {
  return std::ranges::any_of(descriptions_, [&](const auto& heard) {
    const auto& [peer, text] = heard;
    return !text.starts_with(kRefusal) && wire().sends_pending_to(peer);  // who refuses takes none
  });
}

Status Engine::Driver::find_difference() const {
  for (const auto& [peer, other] : descriptions_) {
    if (other.starts_with(kRefusal)) {
      return {StatusCode::kPeerMismatch, "rank " + std::to_string(peer) +
                                             " can't take part: " + other.substr(kRefusal.size())};
    }
    GW_RETURN_IF_ERROR(compare_descriptions(rank(), held_->description, peer, other));
  }
  return {};
}

Result<bool> Engine::Driver::exchange_packets() {
  if (exchange().done()) {
    // Other messages that have arrived are taken at once: a late push needs its answer, and a
    // stale model needs its versions.
    GW_ASSIGN_OR_RETURN(const bool more, listening_.empty() ? false : take({}, false));
    if (!more) state_ = State::kFlushing;
    return more;
  }
  if (!listening_.empty()) {
    GW_RETURN_IF_ERROR(find_end());
    if (state_ != State::kExchanging) return true;
  }
  std::vector<uint32_t> awaited = exchange().awaiting();
  std::erase_if(awaited, [&](uint32_t peer) { return wire().heard(peer, Wire::Notice::kLeft); });
  return take(awaited, exchange().awaits_any());
}

Result<bool> Engine::Driver::take(std::span<const uint32_t> awaited, bool any, bool flushing) {
  return wire().poll({.awaited = awaited,
                      .any = any,
                      .listening = listening_,
                      .flushing = flushing,
                      .max_size = max_message_size_},
                     [&](uint32_t peer, std::span<const std::byte> message) {
                       GW_RETURN_IF_ERROR(exchange().receive(peer, message));
                       return send_outgoing();
                     });
}

Status Engine::Driver::find_end() {
  GW_RETURN_IF_ERROR(wire().receive_notices());
  const std::vector<uint32_t> awaited = exchange().awaiting();
  const auto is_gone = [&](uint32_t peer) {
    return wire().heard(peer, Wire::Notice::kLeft) || wire().heard(peer, Wire::Notice::kOver);
  };
  // A server needs any of the ranks that it waits for; a worker needs all of them.
  over_ = exchange().awaits_any() ? std::ranges::all_of(awaited, is_gone)
                                  : std::ranges::any_of(awaited, is_gone);
  if (over_) state_ = State::kIdle;
  return {};
}

Result<bool> Engine::Driver::run_out() {
  GW_RETURN_IF_ERROR(wire().receive_notices());
  std::vector<uint32_t> there = listening_;
  std::erase_if(there, [&](uint32_t peer) { return wire().heard(peer, Wire::Notice::kLeft); });
  if (there.empty() && exchange().awaits_any() && !announced_left_) {
    GW_RETURN_IF_ERROR(send_notices(Wire::Notice::kLeft));
    announced_left_ = true;
  }
  left_ = there.empty() && !wire().any_sends_pending();
  return left_ ? true : take(there, false, there.empty());
}

Status Engine::Driver::send_notices(Wire::Notice notice) {
  for (uint32_t peer : listening_) GW_RETURN_IF_ERROR(wire().send_notice(peer, notice));
  return {};
}

Status Engine::Driver::leave() {
  if (state_ == State::kFailed) return failure_;
  if (state_ != State::kIdle) {
    return {StatusCode::kUnexpectedMessage, "leave: a step is under way"};
  }
  if (listening_.empty() || !agreed_ || left_) return {};
  const bool server = exchange().awaits_any();
  GW_RETURN_IF_ERROR(keep(send_notices(server ? Wire::Notice::kOver : Wire::Notice::kLeft)));
  announced_left_ = !server;
  return keep(repeat([&] { return run_out(); }, [&] { return left_; }));
}

Engine::Engine(std::unique_ptr<Driver> driver) : driver_(std::move(driver)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

Result<Engine> Engine::create(MPI_Comm comm, std::unique_ptr<Exchange> exchange,
                              double timeout_seconds, std::string_view preface) {
  GW_ASSIGN_OR_RETURN(auto communicator, Communicator::attach(comm));
  if (!(timeout_seconds > 0)) {
    return Status(StatusCode::kInvalidArgument,
                  "the timeout must be above 0 seconds, got " + std::to_string(timeout_seconds));
  }
  return Engine(std::make_unique<Driver>(std::move(communicator), std::move(exchange),
                                         timeout_seconds, preface));
}

Status Engine::refuse(MPI_Comm comm, Status reason) {
  Result<std::shared_ptr<Communicator>> attached = Communicator::attach(comm);
  if (!attached.ok()) return reason;
  auto held = std::make_unique<Held>(attached.value(), kDefaultTimeout,
                                     std::string(kRefusal) + reason.message());
  // Ranks that don't receive this will report this rank as silent.
  (void)held->send_description();
  (void)held->wire.poll({.awaited = {}}, {});
  release(std::move(held));
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
