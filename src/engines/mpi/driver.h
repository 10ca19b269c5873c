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
// `failed` is the end of all but idle.
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
  Status start_exchange();
  Status send_outgoing();
  [[nodiscard]] std::vector<uint32_t> ranks_not_heard() const;
  Status find_difference() const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Held> held_;
  State state_ = State::kIdle;
  bool agreed_ = false;
  std::vector<std::optional<std::string>> descriptions_;  // of each rank
  std::span<float> bucket_;
  uint64_t step_ = 0;
  uint64_t round_ = 0;
  Status failure_;
};

}  // namespace gradwire::mpi
