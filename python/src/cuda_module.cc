// gradwire._cuda: the codecs on a GPU, for exchanges of gradwire._core. It is a module of its own,
// so that gradwire._core does not need CUDA. The tests build it again with kernels that run on the
// host.

#include <cuda_runtime_api.h>

#include <cstdint>

#include <nanobind/nanobind.h>

#include "cuda/shards/device_shard_codec.h"
#include "errors.h"
#include "module.h"

namespace nb = nanobind;

NB_MODULE(_cuda, module) {
  using namespace gradwire::python;
  nb::set_leak_warnings(false);
  module.doc() = "Codecs on NVIDIA GPUs, in builds with GRADWIRE_CUDA=ON.";
  import_errors();
  module.def(
      "shard_codecs",
      [](int device, uintptr_t stream, bool offload_residuals) {
        using gradwire::cuda::ResidualMemory;
        return ShardCodecs{gradwire::cuda::device_shard_codecs(
            device, reinterpret_cast<cudaStream_t>(stream),
            offload_residuals ? ResidualMemory::kHost : ResidualMemory::kDevice)};
      },
      nb::arg("device"), nb::arg("stream"), nb::arg("offload_residuals") = false,
      "For Exchange(shard_codecs=) of buckets on the device, whose work is queued on the stream. "
      "offload_residuals: they lie in page-locked memory of the host.");
}
