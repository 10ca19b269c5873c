// gradwire._cuda: the codecs on a GPU, for exchanges of gradwire._core, and for callers whose
// memory is PyTorch's. A module of its own, so that gradwire._core needs nothing of CUDA. The tests
// build it once more, over kernels that run on the host.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "cuda/shards/device_shard_codec.h"
#include "errors.h"
#include "gradwire/cuda.h"
#include "shard_codecs.h"

namespace nb = nanobind;

namespace gradwire::python {
namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

class PyBucketCodec {
 public:
  PyBucketCodec(const std::string& codec,
                const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& segments)
      : codec_(value_or_raise(Codec::parse(codec))), bucket_codec_(create(codec_, segments)) {
    for (const auto& [offset, n, stream] : segments) lengths_.push_back(n);
  }

  [[nodiscard]] const cuda::BucketCodec& get() const { return bucket_codec_; }

  [[nodiscard]] nb::bytes table() const {
    const std::span<const std::byte> table = bucket_codec_.table();
    return nb::bytes(table.data(), table.size());
  }

  // (begin, size of the largest) of each payload.
  [[nodiscard]] std::vector<std::pair<uint64_t, uint64_t>> payload_rooms() const {
    std::vector<std::pair<uint64_t, uint64_t>> rooms;
    for (size_t i = 0; i < lengths_.size(); ++i) {
      rooms.emplace_back(bucket_codec_.payload_offset(i), codec_->max_payload_size(lengths_[i]));
    }
    return rooms;
  }

  [[nodiscard]] const char* residual_dtype() const {
    switch (codec_->residual_type()) {
      case ResidualType::kFloat32:
        return "float32";
      case ResidualType::kBfloat16:
        return "bfloat16";
      case ResidualType::kNone:
        break;
    }
    return nullptr;
  }

  void encode(uintptr_t table, uintptr_t x, uintptr_t residual, uint64_t seed, uint64_t step,
              uintptr_t payloads, uintptr_t encoded, uintptr_t scratch, int device,
              uintptr_t stream) const {
    const nb::gil_scoped_release release;
    select(device);
    const cuda::EncodeArguments arguments = {.table_dev = at<const std::byte>(table),
                                             .dtype = Dtype::kFloat32,
                                             .x_dev = at<const void>(x),
                                             .residual_type = codec_->residual_type(),
                                             .residual_dev = at<void>(residual),
                                             .draw = {.seed = seed, .step = step},
                                             .payloads_dev = at<std::byte>(payloads),
                                             .encoded_dev = at<cuda::EncodedSegment>(encoded),
                                             .scratch_dev = at<std::byte>(scratch)};
    check(bucket_codec_.encode(arguments, reinterpret_cast<cudaStream_t>(stream)));
  }

  void decode(uintptr_t table, uintptr_t payloads, uintptr_t places, uint32_t sources,
              uintptr_t out, bool accumulate, float divisor, uintptr_t decoded, uintptr_t scratch,
              int device, uintptr_t stream) const {
    const nb::gil_scoped_release release;
    select(device);
    const cuda::DecodeArguments arguments = {
        .table_dev = at<const std::byte>(table),
        .payloads_dev = at<const std::byte>(payloads),
        .places_dev = at<const cuda::PayloadPlace>(places),
        .sources = sources,
        .out_dev = at<float>(out),
        .mode = accumulate ? DecodeMode::kAdd : DecodeMode::kStore,
        .divisor = divisor,
        .decoded_dev = at<cuda::DecodedSegment>(decoded),
        .scratch_dev = at<std::byte>(scratch)};
    check(bucket_codec_.decode(arguments, reinterpret_cast<cudaStream_t>(stream)));
  }

 private:
  static cuda::BucketCodec create(
      const std::shared_ptr<const Codec>& codec,
      const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& segments) {
    std::vector<cuda::BucketSegment> made;
    for (const auto& [offset, n, stream] : segments) {
      made.push_back({.offset = offset, .n = n, .stream = stream});
    }
    return value_or_raise(cuda::BucketCodec::create(codec, made));
  }

  // Makes the stream's device current: this copy of CUDA's runtime may not know PyTorch's choice.
  static void select(int device) {
    const cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) return;
    check({StatusCode::kDeviceError,
           "device " + std::to_string(device) + ": " + cudaGetErrorString(error)});
  }

  static void check(const Status& status) {
    if (status.ok()) return;
    const nb::gil_scoped_acquire acquire;
    raise(status);
  }

  std::shared_ptr<const Codec> codec_;
  cuda::BucketCodec bucket_codec_;
  std::vector<uint64_t> lengths_;
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
      [](int device, uintptr_t stream) {
        return ShardCodecs{
            gradwire::cuda::device_shard_codecs(device, reinterpret_cast<cudaStream_t>(stream))};
      },
      nb::arg("device"), nb::arg("stream"),
      "For Exchange(shard_codecs=) of buckets on the device, whose work is queued on the stream.");
  nb::class_<PyBucketCodec>(
      module, "BucketCodec",
      "A codec for all segments of a bucket in device memory (gradwire/cuda.h). Addresses are "
      "those of the device, given as integers; the caller owns all memory and the stream.\n\n"
      "segments: (offset in the bucket, values, stream of draws).")
      .def(nb::init<const std::string&,
                    const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>&>(),
           nb::arg("codec"), nb::arg("segments"))
      .def_prop_ro("table", &PyBucketCodec::table, "To be copied to the device once.")
      .def_prop_ro("encode_scratch_size",
                   [](const PyBucketCodec& self) { return self.get().encode_scratch_size(); })
      .def(
          "decode_scratch_size",
          [](const PyBucketCodec& self, uint32_t sources) {
            return self.get().decode_scratch_size(sources);
          },
          nb::arg("sources"))
      .def_prop_ro("payloads_size",
                   [](const PyBucketCodec& self) { return self.get().payloads_size(); })
      .def_prop_ro("payload_rooms", &PyBucketCodec::payload_rooms,
                   "Where each payload begins, and the size of the largest.")
      .def_prop_ro("residual_dtype", &PyBucketCodec::residual_dtype,
                   "What keeps the residual: float32, bfloat16 or None.")
      .def("encode", &PyBucketCodec::encode, nb::kw_only(), nb::arg("table"), nb::arg("x"),
           nb::arg("residual"), nb::arg("seed"), nb::arg("step"), nb::arg("payloads"),
           nb::arg("encoded"), nb::arg("scratch"), nb::arg("device"), nb::arg("stream"),
           "Queues the kernels. x: float32; encoded: (size, non_finite) u64 a segment.")
      .def("decode", &PyBucketCodec::decode, nb::kw_only(), nb::arg("table"), nb::arg("payloads"),
           nb::arg("places"), nb::arg("sources"), nb::arg("out"), nb::arg("accumulate"),
           nb::arg("divisor"), nb::arg("decoded"), nb::arg("scratch"), nb::arg("device"),
           nb::arg("stream"),
           "Queues the kernels. places: (begin, size) u64 for each source and segment; decoded: "
           "(valid, empty) u32 for each.");
}
