#pragma once

// Functions for tests that run on several ranks.

#include <mpi.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "engines/mpi/communicator.h"
#include "gradwire/mpi.h"

namespace gradwire::mpi {

inline uint32_t my_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return static_cast<uint32_t>(rank);
}

inline uint32_t world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return static_cast<uint32_t>(size);
}

// A communicator of all ranks whose first operation draws as that of any other with its seed().
class FreshWorld {
 public:
  FreshWorld() { MPI_Comm_dup(MPI_COMM_WORLD, &comm_); }
  FreshWorld(const FreshWorld&) = delete;
  FreshWorld& operator=(const FreshWorld&) = delete;
  ~FreshWorld() { MPI_Comm_free(&comm_); }
  [[nodiscard]] MPI_Comm comm() const { return comm_; }
  // With it, a blocking operation draws as an exchange of seed 0.
  [[nodiscard]] uint64_t seed() const { return 0 - Communicator::attach(comm_).value()->number(); }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

// The input of `rank`, which every rank can compute.
inline std::vector<float> input_of(uint32_t rank, uint64_t n, uint64_t seed) {
  std::mt19937_64 random(seed * 1000 + rank);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

inline std::vector<std::vector<float>> inputs_of_all(uint64_t n, uint64_t seed) {
  std::vector<std::vector<float>> inputs;
  for (uint32_t rank = 0; rank < world_size(); ++rank) inputs.push_back(input_of(rank, n, seed));
  return inputs;
}

// Small integers: every sum is exact, and so is every average if `world` divides the sum.
inline std::vector<float> whole_numbers(uint32_t rank, uint64_t n) {
  std::vector<float> values(n);
  for (uint64_t i = 0; i < n; ++i) values[i] = static_cast<float>((i * 7 + rank * 13) % 101);
  return values;
}

template <typename T>
bool same_on_all_ranks(const std::vector<T>& values) {
  std::vector<T> first = values;
  MPI_Bcast(first.data(), static_cast<int>(first.size() * sizeof(T)), MPI_BYTE, 0, MPI_COMM_WORLD);
  return values.empty() || std::memcmp(first.data(), values.data(), values.size() * sizeof(T)) == 0;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace gradwire::mpi
