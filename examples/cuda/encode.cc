// Encodes two gradients, which lie one after the other, on the GPU in one call, and checks that the
// CPU gives the same bytes.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include <gradwire/codec.h>
#include <gradwire/cuda.h>
#include <gradwire/execution.h>

using namespace gradwire;

namespace {

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "encode: CUDA says: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "encode: %s\n", result.status().message().c_str());
    std::exit(1);
  }
  return std::move(result).value();
}

template <typename T>
T* on_device(size_t count, const T* values = nullptr) {
  T* array = nullptr;
  require(cudaMalloc(reinterpret_cast<void**>(&array), count * sizeof(T)));
  if (values) require(cudaMemcpy(array, values, count * sizeof(T), cudaMemcpyHostToDevice));
  return array;
}

}  // namespace

int main() {
  int gpus = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&gpus); error != cudaSuccess || gpus == 0) {
    std::fprintf(stderr, "encode: there is no GPU here that CUDA can use (%s)\n",
                 cudaGetErrorString(error));
    return 1;
  }
  const auto codec = must(Codec::parse("3lc:s=1.75"));
  const std::vector<cuda::BucketSegment> segments = {{.offset = 0, .n = 100'000, .stream = 0},
                                                     {.offset = 100'000, .n = 64, .stream = 1}};
  const auto bucket = must(cuda::BucketCodec::create(codec, segments));
  std::vector<float> x(100'064);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 0.001f * static_cast<float>(i % 1000);

  std::byte* payloads_dev = on_device<std::byte>(bucket.payloads_size());
  auto* encoded_dev = on_device<cuda::EncodedSegment>(segments.size());
  const cuda::EncodeArguments arguments = {
      .table_dev = on_device(bucket.table().size(), bucket.table().data()),
      .x_dev = on_device(x.size(), x.data()),
      .payloads_dev = payloads_dev,
      .encoded_dev = encoded_dev,
      .scratch_dev = on_device<std::byte>(bucket.encode_scratch_size())};
  if (Status status = bucket.encode(arguments, nullptr); !status.ok()) {
    std::fprintf(stderr, "encode: %s\n", status.message().c_str());
    return 1;
  }
  std::vector<cuda::EncodedSegment> encoded(segments.size());
  std::vector<std::byte> payloads(bucket.payloads_size());
  require(cudaMemcpy(encoded.data(), encoded_dev, encoded.size() * sizeof(encoded[0]),
                     cudaMemcpyDeviceToHost));
  require(cudaMemcpy(payloads.data(), payloads_dev, payloads.size(), cudaMemcpyDeviceToHost));

  Execution execution = must(Execution::create());
  for (size_t i = 0; i < segments.size(); ++i) {
    std::vector<std::byte> expected(codec->max_payload_size(segments[i].n));
    expected.resize(must(codec->encode(std::span(x).subspan(segments[i].offset, segments[i].n), {},
                                       {}, expected, execution)));
    const auto begin = payloads.begin() + static_cast<ptrdiff_t>(bucket.payload_offset(i));
    const bool same =
        expected.size() == encoded[i].size && std::equal(expected.begin(), expected.end(), begin);
    std::printf("%llu values: %llu bytes, %s\n", static_cast<unsigned long long>(segments[i].n),
                static_cast<unsigned long long>(encoded[i].size),
                same ? "the CPU's" : "NOT the CPU's");
    if (!same) return 1;
  }
  return 0;
}
