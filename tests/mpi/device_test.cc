// Buffers in the memory of a GPU, for which fake_cuda.cc stands in: nothing may touch them but
// copies, and the results are those of buffers in the host's memory.

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>

#include "gtest/gtest.h"

#include "tests/mpi/ranks.h"

namespace gradwire::mpi {
namespace {

class Device {
 public:
  static Device& get() {
    static Device device;
    return device;
  }
  // Memory of the device with these values.
  float* put(const std::vector<float>& values, bool in_pool = false) const {
    auto* memory = static_cast<float*>(allocate_(values.size() * sizeof(float), in_pool ? 1 : 0));
    write(memory, values);
    return memory;
  }
  void write(float* memory, const std::vector<float>& values) const {
    std::ranges::copy(values, values_(memory));
  }
  std::vector<float> read(float* memory, uint64_t n) const {
    return {values_(memory), values_(memory) + n};
  }
  int retained() const { return retained_(); }

 private:
  Device() {
    void* const library = dlopen(GRADWIRE_FAKE_CUDA, RTLD_NOW | RTLD_GLOBAL);
    EXPECT_NE(library, nullptr) << dlerror();
    allocate_ = reinterpret_cast<void* (*)(size_t, int)>(dlsym(library, "fake_cuda_allocate"));
    retained_ = reinterpret_cast<int (*)()>(dlsym(library, "fake_cuda_retained"));
    values_ = reinterpret_cast<float* (*)(void*)>(dlsym(library, "fake_cuda_values"));
  }

  void* (*allocate_)(size_t, int);
  int (*retained_)();
  float* (*values_)(void*);
};

constexpr uint64_t kValues = 20001;

TEST(DeviceBuffers, AllReduceGivesTheBitsOfTheHost) {
  const Device& device = Device::get();
  const Options options{.codec = "int8"};
  const std::vector<float> input = whole_numbers(my_rank(), kValues);
  std::vector<float> expected = input;
  ASSERT_TRUE(all_reduce(MPI_IN_PLACE, expected.data(), kValues, Dtype::kFloat32, Reduction::kSum,
                         MPI_COMM_WORLD, options)
                  .ok());
  float* const in = device.put(input);
  float* const out = device.put(std::vector<float>(kValues));
  Status status =
      all_reduce(in, out, kValues, Dtype::kFloat32, Reduction::kSum, MPI_COMM_WORLD, options);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(device.read(out, kValues), expected);
  EXPECT_EQ(device.read(in, kValues), input);
  status = all_reduce(MPI_IN_PLACE, in, kValues, Dtype::kFloat32, Reduction::kSum, MPI_COMM_WORLD,
                      options);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(device.read(in, kValues), expected);
}

TEST(DeviceBuffers, OneOfTheTwoMayBeOnTheHost) {
  const Device& device = Device::get();
  const Options options{.codec = "raw"};
  const std::vector<float> input = whole_numbers(my_rank(), kValues);
  std::vector<float> on_host(kValues);
  float* const out = device.put(on_host);
  ASSERT_TRUE(all_reduce(device.put(input), on_host.data(), kValues, Dtype::kFloat32,
                         Reduction::kAverage, MPI_COMM_WORLD, options)
                  .ok());
  ASSERT_TRUE(all_reduce(input.data(), out, kValues, Dtype::kFloat32, Reduction::kAverage,
                         MPI_COMM_WORLD, options)
                  .ok());
  EXPECT_EQ(device.read(out, kValues), on_host);
}

TEST(DeviceBuffers, MemoryOfAPoolHasNoContextOfItsOwn) {
  const Device& device = Device::get();
  std::vector<float> on_host = whole_numbers(my_rank(), kValues);
  float* const memory = device.put(on_host, /*in_pool=*/true);
  for (float* buffer : {on_host.data(), memory}) {
    const Status status = all_reduce(MPI_IN_PLACE, buffer, kValues, Dtype::kFloat32,
                                     Reduction::kSum, MPI_COMM_WORLD, {.codec = "raw"});
    ASSERT_TRUE(status.ok()) << status.message();
  }
  EXPECT_EQ(device.read(memory, kValues), on_host);
  EXPECT_EQ(device.retained(), 0);
}

TEST(DeviceBuffers, APersistentOperationReadsThemInEachStep) {
  const Device& device = Device::get();
  std::vector<float> on_host(kValues);
  float* const memory = device.put(on_host);
  const Options options{.codec = "3lc:s=1.5"};
  const auto prepare = [&](float* buffer) {
    return all_reduce_init(MPI_IN_PLACE, buffer, kValues, Dtype::kFloat32, Reduction::kAverage,
                           MPI_COMM_WORLD, options)
        .value();
  };
  Operation host = prepare(on_host.data());
  Operation staged = prepare(memory);
  for (uint32_t step = 0; step < 3; ++step) {
    std::ranges::copy(whole_numbers(my_rank() + step, kValues), on_host.begin());
    device.write(memory, on_host);
    ASSERT_TRUE(host.start().ok() && host.wait().ok());
    ASSERT_TRUE(staged.start().ok() && staged.wait().ok());
    EXPECT_EQ(device.read(memory, kValues), on_host) << step;
  }
}

TEST(DeviceBuffers, BlocksAreStagedToo) {
  const Device& device = Device::get();
  const uint32_t world = world_size();
  const Options options{.codec = "raw"};
  const std::vector<float> input = whole_numbers(my_rank(), 100 * world);
  std::vector<float> expected(100);
  float* const out = device.put(expected);
  float* const all = device.put(std::vector<float>(100 * world));
  ASSERT_TRUE(reduce_scatter(input.data(), expected.data(), 100, Dtype::kFloat32, Reduction::kSum,
                             MPI_COMM_WORLD, options)
                  .ok());
  ASSERT_TRUE(reduce_scatter(device.put(input), out, 100, Dtype::kFloat32, Reduction::kSum,
                             MPI_COMM_WORLD, options)
                  .ok());
  EXPECT_EQ(device.read(out, 100), expected);
  std::vector<float> gathered(100 * world);
  ASSERT_TRUE(
      allgather(expected.data(), gathered.data(), 100, Dtype::kFloat32, MPI_COMM_WORLD, options)
          .ok());
  ASSERT_TRUE(allgather(out, all, 100, Dtype::kFloat32, MPI_COMM_WORLD, options).ok());
  EXPECT_EQ(device.read(all, 100 * world), gathered);
}

}  // namespace
}  // namespace gradwire::mpi
