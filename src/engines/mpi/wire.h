#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engines/mpi/communicator.h"
#include "gradwire/status.h"

namespace gradwire::mpi {

// Messages of any size between this rank and its peers, in order from each, without ever waiting.
//
// A message goes in pieces of kPieceBytes; one that is shorter (or empty) is the last. So a count
// stays an int, and whoever waits for a large message on a slow link sees it come.
class Wire {
 public:
  static constexpr uint64_t kPieceBytes = uint64_t{1} << 20;

  // Uses `tag` and the one behind it.
  Wire(const Communicator& communicator, int tag, double timeout_seconds);

  // Starts sending; `bytes` stay as they are until sends_pending() is false.
  Status send(uint32_t peer, std::span<const std::byte> bytes);

  using OnMessage = std::function<Status(uint32_t peer, std::span<const std::byte> message)>;
  // Moves what can be moved, and hands over the first message of a rank in `awaited` that is whole.
  // Returns whether anything came. kPeerLost as Engine::test says; `round`, the same on ranks that
  // are at the same step, tells which ranks' word on what they wait for still holds.
  Result<bool> poll(std::span<const uint32_t> awaited, uint64_t round, const OnMessage& on_message);

  [[nodiscard]] bool sends_pending() const noexcept { return !sends_.empty(); }
  // Whether MPI may still read or write memory given to it here.
  [[nodiscard]] bool in_use() const noexcept;

  [[nodiscard]] uint64_t bytes_sent() const noexcept { return bytes_sent_; }
  [[nodiscard]] uint64_t bytes_received() const noexcept { return bytes_received_; }

 private:
  struct Incoming {
    std::vector<std::byte> bytes;  // only grows
    uint64_t used = 0;
    MPI_Request request = MPI_REQUEST_NULL;
    double silent_seconds = 0;  // of those in which this rank waited for it and looked
  };
  // What a rank that has waited for half the timeout tells all others.
  struct Waiting {
    uint64_t round;
    uint32_t rank;      // who tells
    uint32_t awaiting;  // the rank it waits for
  };

  Status complete_sends();
  Result<bool> advance(Incoming& incoming, uint32_t peer, bool& whole);
  Status watch(std::span<const uint32_t> awaited, uint64_t round);
  Status tell_waiting(uint32_t awaiting, uint64_t round);
  // The rank at the end of the chain of those who wait for each other.
  Result<uint32_t> find_silent(uint32_t awaiting, uint64_t round);

  const Communicator& communicator_;
  int tag_;
  double timeout_;
  std::vector<MPI_Request> sends_;
  std::vector<uint32_t> send_peers_;  // of each
  std::vector<int> completed_;
  std::vector<Incoming> incoming_;  // of each rank
  std::vector<std::unique_ptr<Waiting>> told_;
  std::vector<std::optional<Waiting>> heard_;  // of each rank
  uint64_t told_round_ = ~uint64_t{0};
  std::chrono::steady_clock::time_point last_poll_ = {};
  uint64_t bytes_sent_ = 0;
  uint64_t bytes_received_ = 0;
};

}  // namespace gradwire::mpi
