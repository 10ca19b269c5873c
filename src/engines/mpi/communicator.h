#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "base/return_if_error.h"
#include "gradwire/status.h"

namespace gradwire::mpi {

// kPeerLost with MPI's own words, unless code is MPI_SUCCESS.
Status check_mpi(int code, const char* call);
// Calls a function of MPI; returns its error from the enclosing function if it fails.
#define GW_MPI(function, ...) GW_RETURN_IF_ERROR(check_mpi(function(__VA_ARGS__), #function))

// kInvalidArgument before MPI_Init and after MPI_Finalize.
Status check_running();

// A duplicate of a user's communicator, made once and found again through an attribute of it. It
// lives as long as the user's communicator or a holder; errors on it are returned.
class Communicator {
 public:
  // Collective at the first call on `user`, local later. Statuses as for Engine::create.
  static Result<std::shared_ptr<Communicator>> attach(MPI_Comm user);

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  [[nodiscard]] MPI_Comm handle() const noexcept { return handle_; }
  [[nodiscard]] uint32_t rank() const noexcept { return rank_; }
  [[nodiscard]] uint32_t size() const noexcept { return size_; }
  // The lowest rank on the machine of each rank, as MPI_COMM_TYPE_SHARED says. Known from the
  // start: finding it is collective, and ranks whose options differ must not wait for each other.
  [[nodiscard]] const std::vector<uint32_t>& machines() const noexcept { return machines_; }

  // A number that no other communicator in this job has, so that each draws other numbers.
  [[nodiscard]] uint64_t number() const noexcept { return number_; }

  // The number of the next operation: each draws other numbers.
  [[nodiscard]] uint64_t next_operation() const noexcept { return next_operation_; }

  // Takes the next operation's number and its two tags: the returned tag and its successor. All
  // ranks make the operations on a communicator in the same order, so all take the same tags. Tags
  // are reused after at least 16383 operations.
  int take_tags() noexcept { return static_cast<int>(2 * (next_operation_++ % tag_pairs_)); }

 private:
  Communicator() = default;
  Status find_machines();

  MPI_Comm handle_ = MPI_COMM_NULL;
  uint32_t rank_ = 0;
  uint32_t size_ = 0;
  uint64_t number_ = 0;
  std::vector<uint32_t> machines_;
  uint32_t tag_pairs_ = 0;
  uint64_t next_operation_ = 0;
};

}  // namespace gradwire::mpi
