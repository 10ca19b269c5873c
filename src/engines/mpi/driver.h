#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engines/mpi/communicator.h"
#include "engines/mpi/wire.h"
#include "gradwire/mpi.h"

namespace gradwire::mpi {

// The states of an Engine:
//
//   idle -> comparing (before the first step) -> exchanging -> flushing -> idle
//
// `failed` is the end of all but idle. Where the ranks go each at their own pace (the exchange
// listens to some), messages are taken in idle as well, and a step may end undone: it is `over`.
class Engine::Driver {
 public:
  Driver(std::shared_ptr<Communicator> communicator, std::unique_ptr<Exchange> exchange,
         double timeout_seconds, std::string_view preface);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  ~Driver();

  Status start(std::span<float> bucket, uint64_t step);
  Result<bool> test();
  Status wait();
  Status leave();
  [[nodiscard]] bool over() const noexcept { return over_; }

  [[nodiscard]] Exchange& exchange() noexcept { return *held_->exchange; }
  [[nodiscard]] const Wire& wire() const noexcept { return held_->wire; }

 private:
  enum class State : uint8_t { kIdle, kComparing, kExchanging, kFlushing, kFailed };

  // What MPI reads from and writes to.
  struct Held {
    Wire wire;
    std::unique_ptr<Exchange> exchange;
    std::string description;
  };

  // Each returns whether anything moved.
  Result<bool> advance();
  Result<bool> compare();
  Result<bool> exchange_packets();
  // One message of whoever this rank listens to, and what it has to be answered with.
  Result<bool> take(std::span<const uint32_t> awaited, bool any, bool flushing = false);
  // Of those this rank listens to, who has not left.
  [[nodiscard]] std::vector<uint32_t> ranks_there() const;
  // Whether the step under way can be done with whoever is still there.
  Status find_end();
  Result<bool> run_out();
  Status start_exchange();
  Status send_outgoing();
  [[nodiscard]] std::vector<uint32_t> ranks_not_heard() const;
  Status find_difference() const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Held> held_;
  State state_ = State::kIdle;
  bool agreed_ = false;
  std::vector<uint32_t> listening_;
  bool over_ = false;
  bool told_left_ = false;
  bool left_ = false;
  std::vector<std::optional<std::string>> descriptions_;  // of each rank
  std::span<float> bucket_;
  uint64_t step_ = 0;
  Status failure_;
};

}  // namespace gradwire::mpi
