#pragma once

// Arrays on the device for tests, or in plain memory where kernels run on the host.

#include <cuda_runtime.h>

#include <cstring>
#include <span>
#include <vector>

#include "gtest/gtest.h"

namespace gradwire::cuda {

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    // The array has no spare bytes, so that a sanitizer shows reads after the end.
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), bytes()), cudaSuccess);
    // A value that a kernel forgets to set must not be zero by chance.
    if (count_ > 0) {
      EXPECT_EQ(cudaMemset(data_, 0xa5, bytes()), cudaSuccess);
    }
  }
  explicit DeviceArray(std::span<const T> values) : DeviceArray(values.size()) {
    if (values.empty()) return;
    EXPECT_EQ(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), cudaSuccess);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  [[nodiscard]] T* data() { return data_; }
  // Waits for the device.
  [[nodiscard]] std::vector<T> read() const {
    std::vector<T> values(count_);
    if (count_ > 0) {
      EXPECT_EQ(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
    }
    return values;
  }

 private:
  [[nodiscard]] size_t bytes() const { return count_ * sizeof(T); }

  size_t count_;
  T* data_ = nullptr;
};

}  // namespace gradwire::cuda
