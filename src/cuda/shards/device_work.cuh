#pragma once

#include <cstdint>
#include <span>

#include "cuda/common/launch.h"
#include "cuda/shards/device_memory.h"
#include "cuda/shards/shard_values.cuh"

namespace gradwire::cuda {

// The work of a shard codec on its stream. After an error nothing more is done.
class DeviceWork {
 public:
  DeviceWork(int its_device, cudaStream_t its_stream) : device(its_device), stream(its_stream) {}

  // The status of the first operation that failed.
  [[nodiscard]] const Status& status() const { return status_; }

  template <typename Queue>
  void run(const Queue& queue) {
    if (status_.ok()) static_cast<void>(status_ = queue());  // static_cast: as in Call::launch
  }
  // Queues a kernel of shard_values.cuh.
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(uint64_t, Parameters...), uint64_t n, const Arguments&... arguments) {
    run([&] { return cuda::launch(kernel, blocks_of(n), stream, n, arguments...); });
  }
  void copy(void* to, const void* from, uint64_t size, cudaMemcpyKind kind) {
    if (size == 0) return;
    run([&] { return to_status(cudaMemcpyAsync(to, from, size, kind, stream)); });
  }
  void fill(void* to, int byte, uint64_t size) {
    run([&] { return to_status(cudaMemsetAsync(to, byte, size, stream)); });
  }
  void wait() {
    run([&] { return to_status(cudaStreamSynchronize(stream)); });
  }

  // Memory for `count` results that kernels write for the host.
  template <typename T>
  T* results(uint64_t count) {
    run([&] { return results_.reserve(count * sizeof(T)); });
    run([&] { return results_on_host_.reserve(count * sizeof(T)); });
    return results_.as<T>();
  }
  // Waits for the work so far, and returns these results. They are unspecified after an error.
  template <typename T>
  std::span<const T> fetch_results(uint64_t count) {
    copy(results_on_host_.data(), results_.data(), count * sizeof(T), cudaMemcpyDeviceToHost);
    wait();
    return {results_on_host_.as<T>(), count};
  }

  const int device;
  const cudaStream_t stream;

 private:
  Status status_;
  DeviceMemory results_;
  PinnedMemory results_on_host_;
};

// Makes the device of the work current for the thread, as long as the object lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(DeviceWork& work) {
    work.run([&] { return to_status(cudaGetDevice(&before_)); });
    work.run([&] { return to_status(cudaSetDevice(work.device)); });
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (before_ != kNone) static_cast<void>(cudaSetDevice(before_));
  }

 private:
  static constexpr int kNone = -1;

  int before_ = kNone;
};

}  // namespace gradwire::cuda
