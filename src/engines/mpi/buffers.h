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

// Copies between a caller's buffers and the float32 bucket of an exchange. Where possible, the
// bucket is the caller's own output buffer.
class Buffers {
 public:
  // kInvalidArgument: a null pointer that stands for values, or buffers that overlap in part.
  static Status check(const Request& request, uint32_t world);

  // factor: store() multiplies the bucket's values by it.
  Buffers(const Request& request, uint32_t rank, uint32_t world, float factor);

  // Copies the input to the bucket.
  std::span<float> load(Execution& execution);
  // Copies the bucket to the output.
  void store(Execution& execution);

 private:
  [[nodiscard]] float* bucket() noexcept;

  Request request_;
  uint64_t numel_;      // of the bucket
  uint64_t own_block_;  // the index of its first value in the bucket
  float factor_;
  std::vector<float> work_;  // empty if the bucket is the caller's buffer
};

}  // namespace gradwire::mpi
