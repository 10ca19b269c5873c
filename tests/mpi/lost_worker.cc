// Usage: lost_worker MODE, on 4 ranks, of which the last is a server; exit status 0 if the other
// ranks behave as listed.
//
//   worker  worker 2 is killed in its third step: everyone names it
//   server  the server is killed before its third version: everyone names it
//   backup  worker 2 is killed but not needed: 10 versions are finished before it is named

#include <signal.h>
#include <unistd.h>

#include <cstdio>

#include "tests/mpi/ranks.h"
#include "tests/mpi/server_ranks.h"

namespace gradwire::mpi {
namespace {

constexpr uint64_t kVersions = 10;

Status train(ServerRank& rank, Engine& engine, uint32_t lost) {
  for (uint64_t step = 0; !engine.over(); ++step) {
    const bool trained = !rank.is_server() && rank.version() == kVersions;
    // A late worker may get all versions in its first step.
    if (my_rank() == lost && (step == 2 || trained)) kill(getpid(), SIGKILL);
    if (trained) break;
    Status status = engine.start(rank.is_server() ? rank.bucket() : rank.gradient(), step);
    if (status.ok()) status = engine.wait();
    if (!status.ok()) return status;
  }
  return engine.leave();
}

int run(const std::string& mode) {
  const uint32_t lost = mode == "server" ? 3 : 2;
  const bool backup = mode == "backup";
  ServerRank rank(my_rank(), world_size(), 1, "3lc", {.backup = backup ? 1u : 0u});
  Engine engine = Engine::create(MPI_COMM_WORLD, rank.take_exchange(), 0.5).value();
  const Status status = train(rank, engine, lost);
  const std::string wanted = "rank " + std::to_string(lost) + " was silent for 0.5 s";
  const bool right = status.code() == StatusCode::kPeerLost && contains(status.message(), wanted) &&
                     rank.version() == (backup ? kVersions : 2);
  std::fprintf(stderr, "rank %u, version %d: %s: %s\n", my_rank(), static_cast<int>(rank.version()),
               right ? "right" : "WRONG", status.message().c_str());
  return right ? 0 : 1;
}

}  // namespace
}  // namespace gradwire::mpi

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  // MPI_Finalize would wait for ever for the rank that is gone.
  _exit(gradwire::mpi::run(argc > 1 ? argv[1] : "worker"));
}
