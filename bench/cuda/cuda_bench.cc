// The speed of the codecs on a GPU, compared with a copy of the same array in its memory.
//
//   cuda_bench [VALUES]      default 256 M
//
// The bytes moved are those that the algorithm must read and write: for each value x, the residual
// if there is one, the sum to which it is added, and the payloads. Shares are relative to the
// bandwidth of a copy (bytes read and written) in the same process. Times are medians of
// kRepetitions. At the end each target of targets.h is compared with the measured speed, in a line
// that ends with `pass` or `short`.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gradwire/cuda.h"
#include "targets.h"

namespace gradwire::cuda {
namespace {

constexpr int kRepetitions = 9;
// In a world of 8 ranks the owner of a shard adds up 7 payloads and divides by 8.
constexpr uint32_t kSources = 7;

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "cuda_bench: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "cuda_bench: %s\n", status.message().c_str());
  std::exit(1);
}

template <typename T>
class Array {
 public:
  explicit Array(uint64_t count) : count_(count) {
    require(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<uint64_t>(count, 1) * sizeof(T)));
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(data_); }

  [[nodiscard]] T* data() const { return data_; }
  void write(const T* values) {
    require(cudaMemcpy(data_, values, count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  [[nodiscard]] std::vector<T> read() const {
    std::vector<T> values(count_);
    require(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  uint64_t count_;
  T* data_ = nullptr;
};

// Median milliseconds of `work` on the default stream.
template <typename Work>
float milliseconds(const Work& work) {
  cudaEvent_t begin;
  cudaEvent_t end;
  require(cudaEventCreate(&begin));
  require(cudaEventCreate(&end));
  std::vector<float> times(kRepetitions);
  work();
  for (float& time : times) {
    require(cudaEventRecord(begin));
    work();
    require(cudaEventRecord(end));
    require(cudaEventSynchronize(end));
    require(cudaEventElapsedTime(&time, begin, end));
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kRepetitions / 2, times.end());
  return times[kRepetitions / 2];
}

// Lengths of the 161 tensors of ResNet-50 (He et al., 2015), from the first layer to the last.
std::vector<uint64_t> resnet50() {
  std::vector<uint64_t> lengths;
  const auto convolution = [&](uint64_t in, uint64_t out, uint64_t side) {
    lengths.insert(lengths.end(), {in * out * side * side, out, out});  // with batch normalisation
  };
  convolution(3, 64, 7);
  uint64_t in = 64;
  uint64_t width = 64;
  for (int blocks : {3, 4, 6, 3}) {
    for (int block = 0; block < blocks; ++block) {
      convolution(in, width, 1);
      convolution(width, width, 3);
      convolution(width, 4 * width, 1);
      if (block == 0) convolution(in, 4 * width, 1);
      in = 4 * width;
    }
    width *= 2;
  }
  lengths.insert(lengths.end(), {2048 * 1000, 1000});
  return lengths;
}

std::vector<float> synthetic(uint64_t n) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = 0.01f * normal(random) * std::exp(0.5f * normal(random));
  return values;
}

class Bench {
 public:
  explicit Bench(const std::vector<uint64_t>& lengths) : lengths_(lengths) {
    for (uint64_t n : lengths) n_ += n;
    x_ = std::make_unique<Array<float>>(n_);
    residual_ = std::make_unique<Array<float>>(n_);
    out_ = std::make_unique<Array<float>>(n_);
    // A part of the values is repeated, because drawing all of them would take minutes.
    const std::vector<float> part = synthetic(std::min<uint64_t>(n_, 1 << 22));
    for (uint64_t at = 0; at < n_; at += part.size()) {
      require(cudaMemcpy(x_->data() + at, part.data(),
                         std::min<uint64_t>(part.size(), n_ - at) * sizeof(float),
                         cudaMemcpyHostToDevice));
    }
    copy_ms_ = milliseconds([&] {
      require(cudaMemcpyAsync(out_->data(), x_->data(), n_ * sizeof(float),
                              cudaMemcpyDeviceToDevice, nullptr));
    });
  }

  [[nodiscard]] double copy_bandwidth() const {  // bytes per millisecond
    return 8.0 * static_cast<double>(n_) / static_cast<double>(copy_ms_);
  }

  // Prints a line, unless the codec has no kernels.
  std::optional<Measured> run(const std::string& text) {
    const auto codec = Codec::parse(text).value();
    std::vector<BucketSegment> segments;
    uint64_t offset = 0;
    for (uint64_t n : lengths_) {
      segments.push_back({.offset = offset, .n = n, .stream = segments.size()});
      offset += n;
    }
    Result<BucketCodec> made = BucketCodec::create(codec, segments);
    if (!made.ok()) {
      std::printf("%-34s %s\n", text.c_str(), made.status().message().c_str());
      return std::nullopt;
    }
    const BucketCodec& bucket = made.value();
    Array<std::byte> table(bucket.table().size());
    table.write(bucket.table().data());
    Array<std::byte> payloads(bucket.payloads_size());
    Array<EncodedSegment> encoded(segments.size());
    Array<std::byte> scratch(
        std::max(bucket.encode_scratch_size(), bucket.decode_scratch_size(kSources)));
    require(cudaMemset(residual_->data(), 0, n_ * sizeof(float)));
    uint64_t step = 0;
    const bool keeps = codec->residual_type() != ResidualType::kNone;
    const float encode_ms = milliseconds([&] {
      require(bucket.encode({.table_dev = table.data(),
                             .x_dev = x_->data(),
                             .residual_type = codec->residual_type(),
                             .residual_dev = keeps ? residual_->data() : nullptr,
                             .draw = {.seed = 1, .stream = 0, .step = step++},
                             .payloads_dev = payloads.data(),
                             .encoded_dev = encoded.data(),
                             .scratch_dev = scratch.data()},
                            nullptr));
    });
    std::vector<PayloadPlace> places;
    uint64_t sent = 0;
    const std::vector<EncodedSegment> results = encoded.read();
    for (size_t i = 0; i < segments.size(); ++i) {
      places.push_back({bucket.payload_offset(i), results[i].size});
      sent += results[i].size;
    }
    // Each source has its own bytes, because the cache would hold bytes that are read twice.
    Array<std::byte> sources(kSources * bucket.payloads_size());
    for (uint32_t source = 0; source < kSources; ++source) {
      require(cudaMemcpy(sources.data() + source * bucket.payloads_size(), payloads.data(),
                         bucket.payloads_size(), cudaMemcpyDeviceToDevice));
      for (size_t i = 0; source > 0 && i < segments.size(); ++i) {
        places.push_back({source * bucket.payloads_size() + places[i].begin, places[i].size});
      }
    }
    Array<PayloadPlace> places_dev(places.size());
    places_dev.write(places.data());
    Array<DecodedSegment> decoded(places.size());
    const auto decode = [&](uint32_t count, float divisor) {
      return milliseconds([&] {
        require(bucket.decode({.table_dev = table.data(),
                               .payloads_dev = sources.data(),
                               .places_dev = places_dev.data(),
                               .sources = count,
                               .out_dev = out_->data(),
                               .mode = DecodeMode::kAdd,
                               .divisor = divisor,
                               .decoded_dev = decoded.data(),
                               .scratch_dev = scratch.data()},
                              nullptr));
      });
    };
    const float decode_ms = decode(1, 0);
    const float sum_ms = decode(kSources, kSources + 1);
    for (const DecodedSegment& segment : decoded.read()) {
      if (segment.valid == 0) {
        std::fprintf(stderr, "cuda_bench: %s does not decode what it encoded\n", text.c_str());
        std::exit(1);
      }
    }
    const bool scaled =
        text.substr(0, 4) != "ince" && text != "bf16" && text != "fp16" && text != "raw";
    const double n = static_cast<double>(n_);
    const double encode_bytes =
        n * ((scaled ? 2 : 1) * (keeps ? 8 : 4) + (keeps ? 4 : 0)) + static_cast<double>(sent);
    const double decode_bytes = n * 8 + static_cast<double>(sent);
    const double sum_bytes = n * 8 + kSources * static_cast<double>(sent);
    const Measured measured = {
        .encode_ms = static_cast<double>(encode_ms),
        .encode_share = encode_bytes / static_cast<double>(encode_ms) / copy_bandwidth(),
        .decode_add_share = decode_bytes / static_cast<double>(decode_ms) / copy_bandwidth()};
    std::printf("%-34s %8.3f %9.4f %6.2f %10.4f %6.2f %9.4f %6.2f\n", text.c_str(),
                8 * static_cast<double>(sent) / n, measured.encode_ms, measured.encode_share,
                static_cast<double>(decode_ms), measured.decode_add_share,
                static_cast<double>(sum_ms),
                sum_bytes / static_cast<double>(sum_ms) / copy_bandwidth());
    return measured;
  }

 private:
  std::vector<uint64_t> lengths_;
  uint64_t n_ = 0;
  std::unique_ptr<Array<float>> x_, residual_, out_;
  float copy_ms_ = 0;
};

using Table = std::map<std::string, Measured>;  // by codec

Table run(const char* title, const std::vector<uint64_t>& lengths) {
  Bench bench(lengths);
  std::printf("\n%s; copy %.0f GB/s read and written\n", title, bench.copy_bandwidth() / 1e6);
  std::printf("%-34s %8s %9s %6s %10s %6s %9s %6s\n", "codec", "bits", "encode ms", "share",
              "decode_add", "share", "7, / 8", "share");
  Table table;
  for (const char* codec :
       {"3lc:s=1.75,coder=none", "3lc:s=1.75", "3lc:s=1.75,coder=rice", "3lc:s=1.00,coder=rice",
        "terngrad", "stoch3", "stc", "qsgd:bits=2", "qsgd:bits=4", "qsgd:bits=8",
        "qsgd:bits=2,coder=elias", "int8", "onebit", "topk", "inceptionn", "bf16", "fp16", "raw"}) {
    if (const auto measured = bench.run(codec)) table[codec] = *measured;
  }
  return table;
}

}  // namespace
}  // namespace gradwire::cuda

int main(int argc, char** argv) {
  using namespace gradwire::cuda;
  const uint64_t values = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : kTargetValues;
  if (values == 0) {
    std::fprintf(stderr, "usage: cuda_bench [VALUES]\n");
    return 2;
  }
  int gpus = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&gpus); error != cudaSuccess || gpus == 0) {
    std::fprintf(stderr, "cuda_bench: there is no GPU here that CUDA can use (%s)\n",
                 cudaGetErrorString(error));
    return 1;
  }
  cudaDeviceProp device{};
  int driver = 0;
  require(cudaGetDeviceProperties(&device, 0));
  require(cudaDriverGetVersion(&driver));
  std::printf("%s, compute capability %d.%d, %.0f GiB; driver for CUDA %d.%d\n", device.name,
              device.major, device.minor, static_cast<double>(device.totalGlobalMem) / 0x1p30,
              driver / 1000, driver % 1000 / 10);
  const std::string title = "one tensor of " + std::to_string(values) + " values";
  const Table tables[] = {run(title.c_str(), {values}), run("2^20 values", {uint64_t{1} << 20}),
                          run("ResNet-50, 161 tensors in one bucket", resnet50())};
  if (values != kTargetValues) {
    std::printf("\nno targets: those are for %llu values\n",
                static_cast<unsigned long long>(kTargetValues));
    return 0;
  }
  std::printf("\n%-58s %8s %9s\n", "target", "", "measured");
  for (const Target& target : kTargets) {
    const double measured = target.take(tables[static_cast<size_t>(target.input)].at(target.codec));
    std::printf(
        "%-58s %s %-6.4g %8.4f  %s\n", target.name, target.at_least ? ">=" : "< ", target.limit,
        measured,
        (target.at_least ? measured >= target.limit : measured < target.limit) ? "pass" : "short");
  }
  return 0;
}
