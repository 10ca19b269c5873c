#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cuda/common/cuda_status.h"

namespace gradwire::cuda {

// Memory that grows, from one of CUDA's pairs of functions.
template <cudaError_t (*kAllocate)(void**, size_t), cudaError_t (*kFree)(void*)>
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Memory() { static_cast<void>(kFree(data_)); }

  // Makes room for at least `size` bytes. What was in the memory is lost if it grows.
  Status reserve(uint64_t size) {
    if (size <= size_) return {};
    static_cast<void>(kFree(std::exchange(data_, nullptr)));
    size_ = 0;
    const Status status = to_status(kAllocate(&data_, size));
    if (status.ok()) size_ = size;
    return status;
  }
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <typename T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  uint64_t size_ = 0;
};

inline cudaError_t allocate_device(void** memory, size_t size) { return cudaMalloc(memory, size); }
// Page-locked, so that copies run beside the device's work.
inline cudaError_t allocate_pinned(void** memory, size_t size) {
  return cudaMallocHost(memory, size);
}

using DeviceMemory = Memory<allocate_device, cudaFree>;
using PinnedMemory = Memory<allocate_pinned, cudaFreeHost>;

}  // namespace gradwire::cuda
