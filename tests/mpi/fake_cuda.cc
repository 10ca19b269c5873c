// Stands in for libcuda.so.1 where there is no GPU. "Memory of the device" can't be read or written
// at its address; only the copies here reach it, through a second address, and only in its context.

#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <map>

#include <sys/mman.h>

namespace {

using Address = unsigned long long;

constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;

struct Memory {
  size_t size;
  std::byte* there;  // where the bytes can be read
  bool in_pool;      // it has no context of its own
};

std::map<Address, Memory>& allocated() {
  static std::map<Address, Memory> memory;
  return memory;
}
int the_context = 0;
int retained = 0;  // how often the primary context is
thread_local void* current = nullptr;

// Where the bytes at a device's address can be read; null if it is none.
std::byte* find(Address address, size_t size) {
  auto found = allocated().upper_bound(address);
  if (found == allocated().begin()) return nullptr;
  --found;
  const Address offset = address - found->first;
  return offset + size <= found->second.size ? found->second.there + offset : nullptr;
}

}  // namespace

extern "C" {

void* fake_cuda_allocate(size_t size, int in_pool) {
  const int file = memfd_create("device", 0);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return nullptr;
  void* const device = mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
  void* const there = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  allocated()[reinterpret_cast<Address>(device)] = {size, static_cast<std::byte*>(there),
                                                    in_pool != 0};
  return device;
}
// For the test, which has no kernels: what the device would see.
float* fake_cuda_values(void* device) {
  return reinterpret_cast<float*>(find(reinterpret_cast<Address>(device), 1));
}

int cuPointerGetAttribute(void* value, int attribute, Address memory) {
  if (find(memory, 1) == nullptr) return kInvalidValue;
  if (attribute == 1) {
    auto found = allocated().upper_bound(memory);
    void* const context = (--found)->second.in_pool ? nullptr : &the_context;
    std::memcpy(value, &context, sizeof context);
  } else {
    const unsigned answer = attribute == 2 ? 2 : 0;  // a device's; not managed
    std::memcpy(value, &answer, sizeof answer);
  }
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (device != 0) return kInvalidValue;
  ++retained;
  *context = &the_context;
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int) { return --retained < 0 ? kInvalidContext : 0; }
int fake_cuda_retained() { return retained; }
int cuCtxPushCurrent_v2(void* context) {
  current = context;
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = current;
  current = nullptr;
  return 0;
}
int cuMemcpyDtoH_v2(void* host, Address device, size_t size) {
  if (current != &the_context) return kInvalidContext;
  if (find(device, size) == nullptr) return kInvalidValue;
  std::memcpy(host, find(device, size), size);
  return 0;
}
int cuMemcpyHtoD_v2(Address device, const void* host, size_t size) {
  if (current != &the_context) return kInvalidContext;
  if (find(device, size) == nullptr) return kInvalidValue;
  std::memcpy(find(device, size), host, size);
  return 0;
}

}  // extern "C"
