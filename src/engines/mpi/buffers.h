#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/execution.h"
#include "gradwire/mpi.h"

namespace gradwire::mpi {

enum class Collective : uint8_t { kAllReduce, kReduceScatter, kAllgather };

// What a caller asked for. count: values of a block, or of the buffer where there are no blocks.
struct Request {
  Collective collective;
  const void* sendbuf;
  void* recvbuf;
  uint64_t count;
  Dtype dtype;
  Reduction reduction;
  MPI_Comm comm;

  [[nodiscard]] bool in_place() const { return sendbuf == MPI_IN_PLACE || sendbuf == recvbuf; }
};

// Between a caller's buffers and the bucket of float32 that an exchange works in, which is the
// caller's own where it can be.
class Buffers {
 public:
  // kInvalidArgument: a null pointer that stands for values, or buffers that overlap in part.
  static Status check(const Request& request, uint32_t world);

  // factor: of the bucket's values in the output.
  Buffers(const Request& request, uint32_t rank, uint32_t world, float factor);

  // Input to bucket.
  std::span<float> load(Execution& execution);
  // Bucket to output.
  void store(Execution& execution);

 private:
  [[nodiscard]] float* bucket() noexcept;

  Request request_;
  uint64_t numel_;      // of the bucket
  uint64_t own_block_;  // its first value
  float factor_;
  std::vector<float> work_;  // empty where the bucket is the caller's
};

}  // namespace gradwire::mpi
