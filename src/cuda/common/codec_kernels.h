#pragma once

#include <cstdint>
#include <memory>

#include "cuda/common/launch.h"
#include "cuda/common/segments.h"
#include "gradwire/cuda.h"

namespace gradwire::cuda {

// One call that encodes or decodes: it hands out the parts of its scratch memory, one after the
// other, and queues its kernels. A call without a stream only counts the bytes of scratch memory,
// and queues nothing.
class Call {
 public:
  explicit Call(const Segments& its_segments) : segments(its_segments) {}
  Call(const Segments& its_segments, std::byte* scratch, cudaStream_t stream)
      : segments(its_segments), counts_(false), scratch_(scratch), stream_(stream) {}

  // nullptr where it counts, and for no values.
  template <typename T>
  T* take(uint64_t count) {
    static_assert(alignof(T) <= kAlignment);
    std::byte* part = counts_ || count == 0 ? nullptr : scratch_ + size_;
    size_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(part);
  }
  [[nodiscard]] uint64_t scratch_size() const { return size_; }
  [[nodiscard]] bool counts() const { return counts_; }

  // Queues a kernel, whose first argument is the segments. After a launch that failed, no other
  // kernel is queued.
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Segments, Parameters...), uint64_t blocks,
              const Arguments&... arguments) {
    if (counts_ || !status_.ok()) return;
    // nvcc takes the result of an assignment for a Status that is ignored.
    static_cast<void>(status_ = cuda::launch(kernel, blocks, stream_, segments, arguments...));
  }
  // The status of the first launch that failed.
  [[nodiscard]] const Status& status() const { return status_; }

  const Segments segments;

 private:
  static constexpr uint64_t kAlignment = 8;

  bool counts_ = true;
  std::byte* scratch_ = nullptr;
  cudaStream_t stream_ = nullptr;
  uint64_t size_ = 0;
  Status status_;
};

// What a codec does on the device, for all segments at once. A call that only counts has arguments
// without addresses.
class CodecKernels {
 public:
  virtual ~CodecKernels() = default;

  virtual void encode(Call& call, const EncodeArguments& arguments) const = 0;
  virtual void decode(Call& call, const DecodeArguments& arguments) const = 0;
};

// Make the kernels of a codec; named by the symbols of cuda_kernels.def. Null: there are none for
// these parameters.
namespace kernel_factories {
#define GW_KERNELS(symbol) std::unique_ptr<const CodecKernels> symbol(const Codec& codec);
#include "cuda/cuda_kernels.def"
#undef GW_KERNELS
}  // namespace kernel_factories

}  // namespace gradwire::cuda
