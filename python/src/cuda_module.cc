// gradwire._cuda: the codecs on a GPU, for exchanges of gradwire._core and for a training in one
// process. It is a module of its own, so that gradwire._core does not need CUDA. The tests build it
// again with kernels that run on the host.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cuda/shards/device_memory.h"
#include "cuda/shards/device_shard_codec.h"
#include "errors.h"
#include "gil.h"
#include "gradwire/cuda.h"
#include "module.h"

namespace nb = nanobind;

namespace gradwire::python {
namespace {

void check(const Status& status) {
  if (status.ok()) return;
  const GilHeld held;
  raise(status);
}
void check(cudaError_t error) { check(cuda::to_status(error)); }

// A compressor for each of several tensors that lie one after the other in an array of float32 in
// device memory. The payloads never leave the device.
class DeviceCompressors {
 public:
  // lengths: of the tensors, the first of which begins at value `offset` and has the draw stream
  // `draw_stream`; each further tensor has the next number.
  DeviceCompressors(const std::string& codec, const std::vector<uint64_t>& lengths, uint64_t offset,
                    uint64_t draw_stream, uint64_t seed, int device, uintptr_t stream)
      : codec_(create(codec, lengths, offset, draw_stream)),
        residual_type_(codec_.codec().residual_type()),
        places_(lengths.size()),
        encoded_(lengths.size()),
        seed_(seed),
        device_(device),
        stream_(reinterpret_cast<cudaStream_t>(stream)) {
    for (uint64_t n : lengths) offset += n;
    const uint64_t residual_size =
        offset * (residual_type_ == ResidualType::kFloat32 ? sizeof(float) : sizeof(uint16_t));
    check(cudaSetDevice(device_));
    check(table_dev_.reserve(codec_.table().size()));
    check(cudaMemcpy(table_dev_.data(), codec_.table().data(), codec_.table().size(),
                     cudaMemcpyHostToDevice));
    if (residual_type_ != ResidualType::kNone) {
      check(residual_dev_.reserve(residual_size));
      check(cudaMemset(residual_dev_.data(), 0, residual_size));
    }
    check(payloads_dev_.reserve(codec_.payloads_size()));
    check(encoded_dev_.reserve(lengths.size() * sizeof(cuda::EncodedSegment)));
    check(places_dev_.reserve(lengths.size() * sizeof(cuda::PayloadPlace)));
    check(decoded_dev_.reserve(lengths.size() * sizeof(cuda::DecodedSegment)));
    check(
        scratch_dev_.reserve(std::max(codec_.encode_scratch_size(), codec_.decode_scratch_size())));
  }

  std::vector<std::pair<uint64_t, bool>> transmit(uintptr_t x, uint64_t step, uintptr_t sums) {
    if (x == 0 || sums == 0) {
      raise(StatusCode::kInvalidArgument, "transmit: an address is 0; the array was freed");
    }
    return without_gil([&] { return encode_and_decode(x, step, sums); });
  }

 private:
  std::vector<std::pair<uint64_t, bool>> encode_and_decode(uintptr_t x, uint64_t step,
                                                           uintptr_t sums) {
    // This copy of CUDA's runtime may not know which device PyTorch chose.
    check(cudaSetDevice(device_));
    check(codec_.encode({.table_dev = table_dev_.data(),
                         .dtype = Dtype::kFloat32,
                         .x_dev = reinterpret_cast<const void*>(x),
                         .residual_type = residual_type_,
                         .residual_dev = residual_dev_.data(),
                         .draw = {.seed = seed_, .step = step},
                         .payloads_dev = payloads_dev_.data(),
                         .encoded_dev = encoded_dev_.as<cuda::EncodedSegment>(),
                         .scratch_dev = scratch_dev_.data()},
                        stream_));
    check(cudaMemcpyAsync(encoded_.data(), encoded_dev_.data(),
                          encoded_.size() * sizeof(encoded_[0]), cudaMemcpyDeviceToHost, stream_));
    check(cudaStreamSynchronize(stream_));
    std::vector<std::pair<uint64_t, bool>> sent;
    for (size_t i = 0; i < encoded_.size(); ++i) {
      places_[i] = {codec_.payload_offset(i), encoded_[i].size};
      sent.emplace_back(encoded_[i].size, encoded_[i].non_finite == cuda::EncodedSegment::kFinite);
    }
    check(cudaMemcpyAsync(places_dev_.data(), places_.data(), places_.size() * sizeof(places_[0]),
                          cudaMemcpyHostToDevice, stream_));
    check(codec_.decode({.table_dev = table_dev_.data(),
                         .payloads_dev = payloads_dev_.data(),
                         .places_dev = places_dev_.as<cuda::PayloadPlace>(),
                         .sources = 1,
                         .out_dev = reinterpret_cast<float*>(sums),
                         .mode = DecodeMode::kAdd,
                         .divisor = 1,
                         .decoded_dev = decoded_dev_.as<cuda::DecodedSegment>(),
                         .scratch_dev = scratch_dev_.data()},
                        stream_));
    return sent;
  }

  static cuda::BucketCodec create(const std::string& codec, const std::vector<uint64_t>& lengths,
                                  uint64_t offset, uint64_t draw_stream) {
    std::vector<cuda::BucketSegment> segments;
    for (uint64_t n : lengths) {
      segments.push_back({.offset = offset, .n = n, .stream = draw_stream++});
      offset += n;
    }
    return value_or_raise(cuda::BucketCodec::create(value_or_raise(Codec::parse(codec)), segments));
  }

  cuda::BucketCodec codec_;
  ResidualType residual_type_;
  std::vector<cuda::PayloadPlace> places_;
  std::vector<cuda::EncodedSegment> encoded_;
  uint64_t seed_;
  int device_;
  cudaStream_t stream_;
  cuda::DeviceMemory table_dev_;
  cuda::DeviceMemory residual_dev_;
  cuda::DeviceMemory payloads_dev_;
  cuda::DeviceMemory encoded_dev_;
  cuda::DeviceMemory places_dev_;
  cuda::DeviceMemory decoded_dev_;
  cuda::DeviceMemory scratch_dev_;
};

}  // namespace
}  // namespace gradwire::python

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
  nb::class_<DeviceCompressors>(
      module, "DeviceCompressors",
      "A compressor for each of several tensors that lie one after the other, from value `offset` "
      "on, in an array of float32 on the device. The first draws from draw_stream, the next ones "
      "from the numbers after it. Addresses are those of the device, given as integers.")
      .def(nb::init<const std::string&, const std::vector<uint64_t>&, uint64_t, uint64_t, uint64_t,
                    int, uintptr_t>(),
           nb::kw_only(), nb::arg("codec"), nb::arg("lengths"), nb::arg("offset"),
           nb::arg("draw_stream"), nb::arg("seed"), nb::arg("device"), nb::arg("stream"))
      .def("transmit", &DeviceCompressors::transmit, nb::kw_only(), nb::arg("x"), nb::arg("step"),
           nb::arg("sums"),
           "Encodes the array at x with the residuals, and adds it, decoded, to the array at sums. "
           "Returns (bytes of the payload, whether the values were finite) of each tensor.");
}
