#include "engines/mpi/device.h"

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>

namespace gradwire::mpi {
namespace {

using Address = unsigned long long;  // CUdeviceptr
using Context = void*;               // CUcontext

// Of CUpointer_attribute and CUmemorytype.
constexpr int kContext = 1;
constexpr int kMemoryType = 2;
constexpr int kIsManaged = 8;
constexpr int kDeviceOrdinal = 9;
constexpr unsigned kDevice = 2;

// The functions of libcuda.so.1 that are needed here; a CUresult of 0 is success.
struct Driver {
  int (*get_attribute)(void* value, int attribute, Address memory);
  int (*push_context)(Context context);
  int (*pop_context)(Context* context);
  int (*retain_primary)(Context* context, int device);
  int (*release_primary)(int device);
  int (*to_host)(void* host, Address device, size_t size);
  int (*to_device)(Address device, const void* host, size_t size);
};

template <typename Function>
bool load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

std::optional<Driver> find_driver() {
  // A program that has memory of a GPU has loaded the driver.
  void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  Driver driver;
  const bool found = library != nullptr &&
                     load(library, "cuPointerGetAttribute", driver.get_attribute) &&
                     load(library, "cuCtxPushCurrent_v2", driver.push_context) &&
                     load(library, "cuCtxPopCurrent_v2", driver.pop_context) &&
                     load(library, "cuDevicePrimaryCtxRetain", driver.retain_primary) &&
                     load(library, "cuDevicePrimaryCtxRelease_v2", driver.release_primary) &&
                     load(library, "cuMemcpyDtoH_v2", driver.to_host) &&
                     load(library, "cuMemcpyHtoD_v2", driver.to_device);
  return found ? std::optional(driver) : std::nullopt;
}

// Null where there is none. It is looked up until it is found: a program may begin to use its GPU
// after its first collective.
const Driver* driver() {
  static std::atomic<const Driver*> known = nullptr;
  if (known.load() == nullptr) {
    if (const std::optional<Driver> found = find_driver()) {
      static const Driver kept = *found;
      known = &kept;
    }
  }
  return known.load();
}

Address address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

// copy() in the context of the memory, which need not be that of this thread. Memory of a pool has
// none of its own; the primary context of its device reaches it.
template <typename Copy>
Status in_context_of(const void* device, const Copy& copy) {
  const Driver& cuda = *driver();
  Context context = nullptr;
  int retained = -1;
  int error = cuda.get_attribute(&context, kContext, address_of(device));
  if (error == 0 && context == nullptr) {
    int ordinal = 0;
    error = cuda.get_attribute(&ordinal, kDeviceOrdinal, address_of(device));
    if (error == 0) error = cuda.retain_primary(&context, ordinal);
    if (error == 0) retained = ordinal;
  }
  if (error == 0) error = cuda.push_context(context);
  if (error == 0) {
    error = copy(cuda);
    const int popped = cuda.pop_context(&context);
    if (error == 0) error = popped;
  }
  if (retained >= 0) static_cast<void>(cuda.release_primary(retained));
  if (error == 0) return {};
  return {StatusCode::kDeviceError,
          "a copy between GPU and host failed with CUresult " + std::to_string(error)};
}

}  // namespace

bool is_on_device(const void* memory) {
  const Driver* const cuda = driver();
  if (cuda == nullptr || memory == nullptr) return false;
  unsigned type = 0;
  unsigned managed = 0;
  if (cuda->get_attribute(&type, kMemoryType, address_of(memory)) != 0) return false;
  if (cuda->get_attribute(&managed, kIsManaged, address_of(memory)) != 0) managed = 0;
  return type == kDevice && managed == 0;
}

Status copy_from_device(const void* device, uint64_t size, void* host) {
  return in_context_of(
      device, [&](const Driver& cuda) { return cuda.to_host(host, address_of(device), size); });
}

Status copy_to_device(const void* host, uint64_t size, void* device) {
  return in_context_of(
      device, [&](const Driver& cuda) { return cuda.to_device(address_of(device), host, size); });
}

}  // namespace gradwire::mpi
