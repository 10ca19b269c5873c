// The speed of the 3LC kernels of each SIMD target on one core, compared with memcpy of as many
// bytes in the same process. A benchmark's name is operation/target/values/data. Each benchmark
// first checks that the target gives the bytes of the scalar kernels, and then times the operation
// and memcpy alternately.
//
//   GB/s    bytes of float32 input (for decoders: output), divided by the median time
//   memcpy  the same for memcpy; share = GB/s / memcpy
//   bits    encoded bits per value
//
// Run:  kernels_bench --benchmark_filter='encode/avx3_dl/'

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "hwy/aligned_allocator.h"

#include "stages/element/bfloat16.h"
#include "stages/kernels.h"
#include "stages/ternary/nearest_trit.h"
#include "stages/trits/trit.h"

namespace gradwire {
namespace {

constexpr size_t kChunkValues = kMaxRunInput * kTritsPerByte;

enum class Shape { kGradient, kUniform, kZero };

struct Data {
  const char* name;
  float sparsity;
  Shape shape;
};

constexpr Data kData[] = {
    {"s=1.00", 1.00f, Shape::kGradient},
    {"s=1.75", 1.75f, Shape::kGradient},
    {"dense", 1.00f, Shape::kUniform},
    {"zero", 1.00f, Shape::kZero},
};

// Memory that is aligned to a cache line, like tensors and unlike std::vector.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t n) : size_(n), data_(hwy::AllocateAligned<T>(n)) {
    std::fill(begin(), end(), T{0});
  }
  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] T* data() { return data_.get(); }
  [[nodiscard]] const T* data() const { return data_.get(); }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  T& operator[](size_t i) { return data_[i]; }

 private:
  size_t size_;
  hwy::AlignedFreeUniquePtr<T[]> data_;
};

// Values up to 1. Those shaped like gradients have exponentially distributed magnitudes, and each
// block of 512 has its own scale, varying log-normally, as layers and filters have.
void make_values(Shape shape, Buffer<float>& values) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::exponential_distribution<float> exponential;
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  float scale = 1.0f;
  for (size_t i = 0; i < values.size() && shape != Shape::kZero; ++i) {
    if (i % 512 == 0) scale = 0.125f * std::exp(0.7f * normal(random) - 0.25f);
    const float sign = (random() & 1) != 0 ? 1.0f : -1.0f;
    values[i] = shape == Shape::kUniform ? uniform(random)
                                         : sign * std::min(1.0f, scale * exponential(random));
  }
}

// The residuals after many steps with the same values up to 1: uniform below half the scale m,
// which by then is s * (m / 2 + 1).
void make_residuals(const Data& data, Buffer<float>& residuals) {
  if (data.shape == Shape::kZero) return;
  std::mt19937 random(2);
  const float m = data.sparsity / (1.0f - data.sparsity / 2);
  std::uniform_real_distribution<float> uniform(-m / 2, m / 2);
  for (float& r : residuals) r = uniform(random);
}

struct Frame {
  float m;
  Buffer<uint8_t> bytes;
  std::vector<size_t> sizes;  // of each chunk
};

// Steps of a compressor with error feedback: each encode changes the residuals.
struct Workload {
  Buffer<float> x, r, out;
  Buffer<uint16_t> r16;
  Buffer<uint8_t> packed;
  Frame frame;

  Workload(size_t n, const Data& data)
      : x(n),
        r(n),
        out(n),
        r16(n),
        packed(packed_size(n)),
        frame{0.0f, Buffer<uint8_t>(packed_size(n)), {}} {
    make_values(data.shape, x);
    make_residuals(data, r);
    find_kernels("scalar")->narrow_bf16(r.data(), n, r16.data());
  }
};

// The codec's two passes: the maximum from the end to the start, and then encoding from the start,
// so that the second pass finds the last part of the first pass in cache.
uint32_t absmax_of_chunks(const Kernels& k, Workload& w) {
  const size_t n = w.x.size();
  uint32_t bits = 0;
  for (size_t chunk = (n + kChunkValues - 1) / kChunkValues; chunk-- > 0;) {
    const size_t first = chunk * kChunkValues;
    const size_t count = std::min(kChunkValues, n - first);
    bits = std::max(bits, k.absmax(w.x.data() + first, w.r.data() + first, count));
  }
  return bits;
}

void encode(const Kernels& k, const Data& data, Workload& w) {
  const size_t n = w.x.size();
  Frame& frame = w.frame;
  frame.m = ternary_multiplier(absmax_of_chunks(k, w), data.sparsity);
  frame.sizes.clear();
  uint8_t* end = frame.bytes.data();
  for (size_t first = 0; first < n; first += kChunkValues) {
    const size_t count = std::min(kChunkValues, n - first);
    frame.sizes.push_back(k.ternary_encode(&w.x[first], &w.r[first], count, frame.m, end));
    end += frame.sizes.back();
  }
}

void decode(const Kernels& k, Workload& w, DecodeMode mode) {
  const uint8_t* codes = w.frame.bytes.data();
  size_t first = 0;
  for (size_t size : w.frame.sizes) {
    const size_t count = std::min(kChunkValues, w.x.size() - first);
    k.zero_run_unpack(codes, size, count, w.frame.m, &w.out[first], mode);
    codes += size;
    first += count;
  }
}

struct Operation {
  const char* name;
  std::function<void(const Kernels&, const Data&, Workload&)> run;
};

const Operation kOperations[] = {
    {"encode", encode},
    {"absmax_f32", [](const Kernels& k, const Data&,
                      Workload& w) { benchmark::DoNotOptimize(absmax_of_chunks(k, w)); }},
    {"absmax_bf16",
     [](const Kernels& k, const Data&, Workload& w) {
       benchmark::DoNotOptimize(k.absmax(w.x.data(), w.r16.data(), w.x.size()));
     }},
    {"ternary_pack_f32",
     [](const Kernels& k, const Data&, Workload& w) {
       k.ternary_pack(w.x.data(), w.r.data(), w.x.size(), w.frame.m, w.packed.data());
     }},
    {"ternary_pack_bf16",
     [](const Kernels& k, const Data&, Workload& w) {
       k.ternary_pack(w.x.data(), w.r16.data(), w.x.size(), w.frame.m, w.packed.data());
     }},
    {"zero_run_encode",
     [](const Kernels& k, const Data&, Workload& w) {
       for (size_t first = 0; first < w.packed.size(); first += kMaxRunInput) {
         benchmark::DoNotOptimize(k.zero_run_encode(&w.packed[first],
                                                    std::min(kMaxRunInput, w.packed.size() - first),
                                                    w.frame.bytes.data()));
       }
     }},
    {"decode_add",
     [](const Kernels& k, const Data&, Workload& w) { decode(k, w, DecodeMode::kAdd); }},
    {"decode",
     [](const Kernels& k, const Data&, Workload& w) { decode(k, w, DecodeMode::kStore); }},
    {"unpack_add",
     [](const Kernels& k, const Data&, Workload& w) {
       k.unpack(w.packed.data(), w.x.size(), w.frame.m, w.out.data(), DecodeMode::kAdd);
     }},
    {"unpack",
     [](const Kernels& k, const Data&, Workload& w) {
       k.unpack(w.packed.data(), w.x.size(), w.frame.m, w.out.data(), DecodeMode::kStore);
     }},
    {"narrow_bf16", [](const Kernels& k, const Data&,
                       Workload& w) { k.narrow_bf16(w.x.data(), w.x.size(), w.r16.data()); }},
    {"widen_add_bf16",
     [](const Kernels& k, const Data&, Workload& w) {
       k.widen_bf16(w.r16.data(), w.x.size(), w.out.data(), DecodeMode::kAdd);
     }},
    {"sum", [](const Kernels& k, const Data&,
               Workload& w) { k.sum(w.out.data(), w.r.data(), w.x.size(), w.out.data()); }},
    {"divide", [](const Kernels& k, const Data&,
                  Workload& w) { k.divide(w.out.data(), w.x.size(), 1.0000001f); }},
};

// Encodes into the frame and keeps the packed bytes for the operations on them.
void prepare(const Kernels& k, const Data& data, Workload& w) {
  encode(k, data, w);
  k.ternary_pack(w.x.data(), w.r.data(), w.x.size(), w.frame.m, w.packed.data());
}

bool same_bytes(const Kernels& k, const Operation& operation, const Data& data, size_t n) {
  const Kernels& scalar = *find_kernels("scalar");
  Workload got(n, data), want(n, data);
  prepare(scalar, data, got);
  prepare(scalar, data, want);
  operation.run(k, data, got);
  operation.run(scalar, data, want);
  const auto same = [](const auto& a, const auto& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof *a.data()) == 0;
  };
  return same(got.r, want.r) && same(got.r16, want.r16) && same(got.out, want.out) &&
         same(got.packed, want.packed) && got.frame.sizes == want.frame.sizes;
}

// The CPU time of this thread, which other programs do not change.
double now() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// The mean time of `calls` consecutive calls.
template <typename Function>
double seconds_of(int calls, Function function) {
  const double start = now();
  for (int i = 0; i < calls; ++i) {
    function();
    benchmark::ClobberMemory();
  }
  return (now() - start) / calls;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void run(benchmark::State& state, const Kernels& k, const Operation& operation, size_t n,
         const Data& data) {
  if (!same_bytes(k, operation, data, 100003)) {
    state.SkipWithError("differs from scalar");
    return;
  }
  Workload w(n, data);
  prepare(k, data, w);
  Buffer<float> copied(n);
  // Alternates, but makes several calls at a time if the data fit in the cache, so that each
  // operation finds its own data there.
  const int turn = n < 1000000 ? 16 : 1;
  std::vector<double> times, memcpy_times;
  for (auto _ : state) {
    memcpy_times.push_back(
        seconds_of(turn, [&] { std::memcpy(copied.data(), w.x.data(), n * sizeof(float)); }));
    times.push_back(seconds_of(turn, [&] { operation.run(k, data, w); }));
    state.SetIterationTime(times.back());
  }
  const double gigabytes = static_cast<double>(n * sizeof(float)) * 1e-9;
  size_t frame_bytes = 0;
  for (size_t size : w.frame.sizes) frame_bytes += size;
  state.counters["GB/s"] = gigabytes / median(times);
  state.counters["memcpy"] = gigabytes / median(memcpy_times);
  state.counters["share"] = median(memcpy_times) / median(times);
  state.counters["bits"] = 8.0 * static_cast<double>(frame_bytes) / static_cast<double>(n);
}

void register_all() {
  for (const Operation& operation : kOperations) {
    for (const Kernels* k : available_kernels()) {
      for (size_t n : {size_t{200000}, size_t{25600000}}) {
        for (const Data& data : kData) {
          const std::string name = std::string(operation.name) + "/" + k->name + "/" +
                                   std::to_string(n) + "/" + data.name;
          benchmark::RegisterBenchmark(name.c_str(),
                                       [&operation, k, n, &data](benchmark::State& state) {
                                         run(state, *k, operation, n, data);
                                       })
              ->UseManualTime()
              ->Iterations(n < 1000000 ? 125 : 15)
              ->Unit(benchmark::kMicrosecond);
        }
      }
    }
  }
}

}  // namespace
}  // namespace gradwire

int main(int argc, char** argv) {
  gradwire::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
