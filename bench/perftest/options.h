#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "gradwire/mpi.h"

namespace gradwire::perftest {

struct Options {
  mpi::Options collective = {.timeout_seconds = 600};
  bool persistent = true;  // false: blocking calls, without error feedback
  Reduction reduction = Reduction::kSum;
  uint64_t min_bytes = 1 << 20;  // of float32
  uint64_t max_bytes = 64 << 20;
  double factor = 4;
  uint64_t tensor_values = 262144;  // values that share a scale; 0: the whole buffer does
  int repetitions = 5;
  int warmups = 2;
  int plain_repetitions = -1;  // of MPI_Allreduce; -1: as repetitions, with its warm-ups
  std::string input = "synthetic";
  bool check = false;
};

[[nodiscard]] std::string usage();

// Reads the command line. Returns a message about what is wrong, or nothing.
std::optional<std::string> parse(int argc, char** argv, Options& options);

}  // namespace gradwire::perftest
