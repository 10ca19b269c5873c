// Usage: lost_peer MODE, on at least 2 ranks; exit status 0 if the last rank is named by all
// others.
//
//   silent  the last rank does not call at all
//   ring    the last rank does not call a second time; most ranks wait for one that waits for it
//   late    as ring, after all others have waited for rank 0 for more than half the timeout
//   killed  the last rank is killed before its second step (mpirun --enable-recovery)

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "tests/mpi/ranks.h"

namespace gradwire::mpi {
namespace {

// 0 if the status names the last rank. `timeout`: text.
int judge(const Status& status, const std::string& timeout) {
  const std::string wanted =
      "rank " + std::to_string(world_size() - 1) + " was silent for " + timeout + " s";
  const bool right = status.code() == StatusCode::kPeerLost && contains(status.message(), wanted);
  std::fprintf(stderr, "rank %u: %s: %s\n", my_rank(), right ? "right" : "WRONG",
               status.message().c_str());
  return right ? 0 : 1;
}

int run(const std::string& mode) {
  const bool lost = my_rank() == world_size() - 1;
  // A loaded machine must not make the late rank a lost one.
  const double timeout = mode == "late" ? 3.0 : 0.5;
  std::vector<float> values(1000, 1.0f);
  const Options options{.codec = "raw",
                        .exchange = mode == "ring" || mode == "late" ? "ring" : "sharded",
                        .timeout_seconds = timeout};
  Result<Operation> operation =
      all_reduce_init(MPI_IN_PLACE, values.data(), values.size(), Dtype::kFloat32,
                      Reduction::kAverage, MPI_COMM_WORLD, options);
  if (!operation.ok()) return 2;
  if (mode != "silent") {
    if (mode == "late" && my_rank() == 0) {
      std::this_thread::sleep_for(std::chrono::duration<double>(0.7 * timeout));
    }
    if (!operation.value().start().ok() || !operation.value().wait().ok()) return 3;
  }
  if (lost) {
    if (mode == "killed") kill(getpid(), SIGKILL);
    std::this_thread::sleep_for(std::chrono::duration<double>(4 * timeout));
    return 0;
  }
  if (!operation.value().start().ok()) return 4;
  return judge(operation.value().wait(), mode == "late" ? "3" : "0.5");
}

}  // namespace
}  // namespace gradwire::mpi

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const std::string mode = argc > 1 ? argv[1] : "silent";
  const int result = gradwire::mpi::run(mode);
  // MPI_Finalize would wait for ever for the rank that is gone.
  if (mode == "killed") _exit(result);
  MPI_Finalize();
  return result;
}
