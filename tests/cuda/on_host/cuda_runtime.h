#pragma once

// The part of CUDA that src/cuda uses, on the host: kernels compiled as C++ against this header run
// as fibers, one for each thread, that take turns at barriers and warp operations. So a machine
// without a GPU can compare their bytes with the CPU's. This shows wrong results, reads out of
// bounds (with a sanitizer), threads that wait at different barriers, and blocks that wait for
// blocks that have not begun. It cannot show speed or memory order.
//
// Threads run in an order drawn from a seed, a new one after each barrier, so that a missing
// barrier changes the results of some seeds. Blocks begin in any order, too, and several run at
// once: at atomics and barriers another block may continue. Shared memory holds arbitrary bytes
// when a block begins.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
// Each running block has a system thread, so thread_local memory is the block's own.
// AddressSanitizer watches the bounds of static arrays only, so with it one block runs at a time.
#ifdef GRADWIRE_ADDRESS_SANITIZER
#define __shared__ static
#else
#define __shared__ static thread_local
#endif
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
  dim3() = default;
  dim3(unsigned only_x) : x(only_x) {}  // NOLINT(google-explicit-constructor): as in CUDA
};

namespace gradwire::on_host {

struct Place {
  dim3 thread;
  dim3 block;
  dim3 block_size;
  dim3 blocks;
};

// The place of the running thread in its grid.
const Place& place();

// The place in the code where a thread waits for the others, which must wait at the same place.
// (clang++ 14 has no std::source_location.)
struct Site {
  const char* file;
  int line;
  static constexpr Site current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Waits for all threads of the block.
void block_barrier(const Site& site);

// Waits for all 32 lanes and returns the values `own` of all lanes.
const uint64_t* exchange(uint64_t own, unsigned mask, const Site& site);

// A point at which another block may continue.
void may_switch();

// Lets other threads and blocks run, for a thread that waits for another block. waits() counts the
// calls.
void wait();
uint64_t waits();

// Runs body once for each thread of each block. set_seed chooses the order of the next launch.
void launch(dim3 blocks, dim3 block_size, const std::function<void()>& body);
void set_seed(uint64_t seed);

template <typename T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}

template <typename T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline unsigned lane() { return place().thread.x % 32; }

}  // namespace gradwire::on_host

#define threadIdx (gradwire::on_host::place().thread)
#define blockIdx (gradwire::on_host::place().block)
#define blockDim (gradwire::on_host::place().block_size)
#define gridDim (gradwire::on_host::place().blocks)

inline void __syncthreads(gradwire::on_host::Site site = gradwire::on_host::Site::current()) {
  gradwire::on_host::block_barrier(site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       gradwire::on_host::Site site = gradwire::on_host::Site::current()) {
  gradwire::on_host::exchange(0, mask, site);
}
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned mask, T value, int from,
              gradwire::on_host::Site site = gradwire::on_host::Site::current()) {
  using namespace gradwire::on_host;
  return from_word<T>(exchange(to_word(value), mask, site)[from & 31]);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta,
                 gradwire::on_host::Site site = gradwire::on_host::Site::current()) {
  using namespace gradwire::on_host;
  const uint64_t* all = exchange(to_word(value), mask, site);
  return lane() < delta ? value : from_word<T>(all[lane() - delta]);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta,
                   gradwire::on_host::Site site = gradwire::on_host::Site::current()) {
  using namespace gradwire::on_host;
  const uint64_t* all = exchange(to_word(value), mask, site);
  return lane() + delta > 31 ? value : from_word<T>(all[lane() + delta]);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int of_lane,
                  gradwire::on_host::Site site = gradwire::on_host::Site::current()) {
  using namespace gradwire::on_host;
  return from_word<T>(
      exchange(to_word(value), mask, site)[lane() ^ static_cast<unsigned>(of_lane)]);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              gradwire::on_host::Site site = gradwire::on_host::Site::current()) {
  const uint64_t* all = gradwire::on_host::exchange(predicate != 0, mask, site);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}

inline unsigned __reduce_add_sync(
    unsigned mask, unsigned value,
    gradwire::on_host::Site site = gradwire::on_host::Site::current()) {
  const uint64_t* all = gradwire::on_host::exchange(value, mask, site);
  unsigned sum = 0;
  for (unsigned i = 0; i < 32; ++i) sum += static_cast<unsigned>(all[i]);
  return sum;
}

inline unsigned __reduce_max_sync(
    unsigned mask, unsigned value,
    gradwire::on_host::Site site = gradwire::on_host::Site::current()) {
  const uint64_t* all = gradwire::on_host::exchange(value, mask, site);
  unsigned largest = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (static_cast<unsigned>(all[i]) > largest) largest = static_cast<unsigned>(all[i]);
  }
  return largest;
}

inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }

// Only one thread of all blocks runs at a time.
template <typename T>
T atomicAdd(T* at, T value) {
  gradwire::on_host::may_switch();
  const T old = *at;
  *at = old + value;
  return old;
}
template <typename T>
T atomicMax(T* at, T value) {
  gradwire::on_host::may_switch();
  const T old = *at;
  if (value > old) *at = value;
  return old;
}
template <typename T>
T atomicMin(T* at, T value) {
  gradwire::on_host::may_switch();
  const T old = *at;
  if (value < old) *at = value;
  return old;
}
template <typename T>
T atomicOr(T* at, T value) {
  gradwire::on_host::may_switch();
  const T old = *at;
  *at = old | value;
  return old;
}
template <typename T>
T atomicExch(T* at, T value) {
  gradwire::on_host::may_switch();
  return std::exchange(*at, value);
}

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = void*;

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDefault };

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  *memory = ::operator new (bytes, std::align_val_t{256});
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* memory) {
  ::operator delete (memory, std::align_val_t{256});
  return cudaSuccess;
}

namespace gradwire::on_host {

inline std::mutex device_mutex;
inline std::map<void*, size_t> device_memory;  // what cudaMalloc gave

}  // namespace gradwire::on_host

inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  const std::lock_guard lock(gradwire::on_host::device_mutex);
  cudaMallocHost(memory, bytes);
  gradwire::on_host::device_memory[*memory] = bytes;
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  const std::lock_guard lock(gradwire::on_host::device_mutex);
  gradwire::on_host::device_memory.erase(memory);
  return cudaFreeHost(memory);
}
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard lock(gradwire::on_host::device_mutex);
  *total = *free = size_t{1} << 40;
  for (const auto& [memory, bytes] : gradwire::on_host::device_memory) *free -= bytes;
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* memory, int byte, size_t bytes) {
  std::memset(memory, byte, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* memory, int byte, size_t bytes, cudaStream_t) {
  return cudaMemset(memory, byte, bytes);
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid value";
}
