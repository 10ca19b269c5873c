// The connections under an engine.

#include "engines/mpi/wire.h"

#include "gtest/gtest.h"

#include "tests/mpi/ranks.h"

namespace gradwire::mpi {
namespace {

constexpr uint64_t kLimit = 3 * Wire::kPieceBytes / 2;

// Rank 0 sends so many bytes to rank 1, which may get at most kLimit. Returns what its wire says.
Status send_to_rank_1(uint64_t size) {
  const std::shared_ptr<Communicator> communicator = Communicator::attach(MPI_COMM_WORLD).value();
  Wire wire(*communicator, communicator->take_tags(), 20.0);
  Status status;
  if (my_rank() == 0) {
    // What rank 1 does not take stays in flight until the process ends.
    static std::vector<std::vector<std::byte>> kept;
    kept.emplace_back(size);
    EXPECT_TRUE(wire.send(1, kept.back()).ok());
  } else if (my_rank() == 1) {
    const uint32_t peers[] = {0};
    uint64_t received = 0;
    while (status.ok() && received == 0) {
      status = wire.poll({.awaited = peers, .max_size = kLimit},
                         [&](uint32_t, std::span<const std::byte> bytes) {
                           received = bytes.size();
                           return Status();
                         })
                   .status();
    }
    EXPECT_EQ(received, status.ok() ? size : 0);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  return status;
}

TEST(Wire, TakesNoMoreThanItsLimit) {
  if (world_size() == 1) return;
  EXPECT_TRUE(send_to_rank_1(kLimit).ok());
  const Status status = send_to_rank_1(kLimit + 1);
  if (my_rank() != 1) return;
  EXPECT_EQ(status.code(), StatusCode::kLimitExceeded);
  EXPECT_EQ(status.message(),
            "rank 0 sent rank 1 a message of at least 1572865 bytes; no message "
            "here has more than 1572864");
}

}  // namespace
}  // namespace gradwire::mpi
