#pragma once

#include <cstddef>
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
// bucket is the caller's own output buffer. Buffers in the memory of a GPU are staged: copied to
// the host before a step, and back after it.
class Buffers {
 public:
  // kInvalidArgument: a null pointer that stands for values, or buffers that overlap in part.
  static Status check(const Request& request, uint32_t world);

  // factor: store() multiplies the bucket's values by it.
  Buffers(const Request& request, uint32_t rank, uint32_t world, float factor);

  // Copies the input to the bucket. kDeviceError.
  Result<std::span<float>> load(Execution& execution);
  // Copies the bucket to the output. kDeviceError.
  Status store(Execution& execution);

 private:
  // What a GPU owns, and the copy that takes its place in `request_`.
  struct Staged {
    void* device = nullptr;  // null: the buffer is in the host's memory
    std::vector<std::byte> host = {};
  };
  // Stages a buffer of so many values, and returns the memory to use in its place.
  void* stage(const void* buffer, uint64_t values, Staged& staged);
  [[nodiscard]] float* bucket() noexcept;

  Request request_;
  uint64_t numel_;      // of the bucket
  uint64_t own_block_;  // the index of its first value in the bucket
  float factor_;
  Staged staged_input_;  // only if it is not in place
  Staged staged_output_;
  std::vector<float> work_;  // empty if the bucket is the caller's buffer
};

}  // namespace gradwire::mpi
