// Speed of the 3LC kernels of each SIMD target on one core, next to memcpy of as many bytes in the
// same process. Name of a benchmark: operation/target/values/data. Each one first checks that the
// target gives the scalar kernels' bytes, then times the operation and memcpy in turns.
//
//   GB/s    float32 input (the decoded tensor where decoding) by the operation's median time
//   memcpy  the same of memcpy; share = GB/s / memcpy
//   bits    encoded bits a value
//
// Run:  kernels_bench --benchmark_filter='encode/avx3_dl/'

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "hwy/aligned_allocator.h"

#include "stages/element.h"
#include "stages/kernels.h"

namespace gradwire {
namespace {

constexpr size_t kChunkValues = kMaxRunInput * kTritsPerByte;

struct Data {
  const char* name;
  float sparsity;
  // Shares of values beyond h for s = 1.00 and s = 1.75; sparse ones are heavy-tailed.
  double beyond_half, beyond_most;
};

constexpr Data kData[] = {
    {"s=1.00", 1.00f, 0.09, 0.01},  // shaped like gradients with residual
    {"s=1.75", 1.75f, 0.09, 0.01},  // the same values
    {"zero", 1.00f, 0.0, 0.0},
    {"dense", 1.00f, 0.5, 0.125},  // uniform
};

// Memory aligned to a cache line, as tensors are; std::vector's is not.
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
  void copy_from(const Buffer& other) { std::copy_n(other.data(), size_, data()); }

 private:
  size_t size_;
  hwy::AlignedFreeUniquePtr<T[]> data_;
};

// Values whose maximum is 1. A block of 512 has its own share of large ones, varying log-normally,
// as layers and filters have; the rest is gauss * exp(gauss), small.
void make_values(const Data& data, Buffer<float>& values) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  if (data.beyond_half == 0.0) return;
  const size_t n = values.size();
  const bool is_dense = data.beyond_half >= 0.5;
  double factor = 1.0;
  for (size_t i = 0; i < n; ++i) {
    if (i % 512 == 0 && !is_dense) factor = std::exp(normal(random) - 0.5);
    const double at = static_cast<double>(uniform(random));
    float magnitude = std::min(0.49f, std::abs(0.05f * normal(random) * std::exp(normal(random))));
    if (is_dense) {
      magnitude = uniform(random);
    } else if (at < data.beyond_most * factor) {
      magnitude = 0.876f + 0.124f * uniform(random);
    } else if (at < data.beyond_half * factor) {
      magnitude = 0.51f + 0.36f * uniform(random);
    }
    values[i] = (random() & 1) != 0 ? magnitude : -magnitude;
  }
  values[n / 2] = 1.0f;
}

struct Frame {
  float m;
  Buffer<uint8_t> bytes;
  std::vector<size_t> sizes;  // of each chunk
};

struct Workload {
  Buffer<float> x, r_before, r, out;
  Buffer<uint16_t> r16_before, r16;
  Buffer<uint8_t> packed;
  Frame frame;

  Workload(size_t n, const Data& data)
      : x(n),
        r_before(n),
        r(n),
        out(n),
        r16_before(n),
        r16(n),
        packed(packed_size(n)),
        frame{0.0f, Buffer<uint8_t>(packed_size(n)), {}} {
    make_values(data, x);
    for (size_t i = 0; i < n; ++i) r_before[i] = 0.25f * x[i], x[i] *= 0.75f;
    find_kernels("scalar")->narrow_bf16(r_before.data(), n, r16_before.data());
    reset();
  }

  // Back to the state before a step.
  void reset() {
    r.copy_from(r_before);
    r16.copy_from(r16_before);
  }
};

// As the codec does it: maximum from the end to the start, then packing from the start on, where
// the second pass finds the last part of the first one in cache.
void encode(const Kernels& k, const Data& data, Workload& w) {
  const size_t n = w.x.size();
  uint32_t bits = 0;
  for (size_t first = (n - 1) / kChunkValues * kChunkValues + kChunkValues; first > 0;) {
    first -= kChunkValues;
    const size_t count = std::min(kChunkValues, n - first);
    bits = std::max(bits, k.absmax_f32(&w.x[first], &w.r[first], count));
  }
  Frame& frame = w.frame;
  frame.m = ternary_multiplier(bits, data.sparsity);
  frame.sizes.clear();
  uint8_t* end = frame.bytes.data();
  for (size_t first = 0; first < n; first += kChunkValues) {
    const size_t count = std::min(kChunkValues, n - first);
    k.ternary_pack_f32(&w.x[first], &w.r[first], count, frame.m, w.packed.data());
    frame.sizes.push_back(k.zero_run_encode(w.packed.data(), packed_size(count), end));
    end += frame.sizes.back();
  }
}

void decode(const Kernels& k, Workload& w, decltype(Kernels::zero_run_unpack) Kernels::*function) {
  const uint8_t* codes = w.frame.bytes.data();
  size_t first = 0;
  for (size_t size : w.frame.sizes) {
    const size_t count = std::min(kChunkValues, w.x.size() - first);
    (k.*function)(codes, size, count, w.frame.m, &w.out[first]);
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
    {"absmax_f32",
     [](const Kernels& k, const Data&, Workload& w) {
       benchmark::DoNotOptimize(k.absmax_f32(w.x.data(), w.r.data(), w.x.size()));
     }},
    {"absmax_bf16",
     [](const Kernels& k, const Data&, Workload& w) {
       benchmark::DoNotOptimize(k.absmax_bf16(w.x.data(), w.r16.data(), w.x.size()));
     }},
    {"ternary_pack_f32",
     [](const Kernels& k, const Data& data, Workload& w) {
       k.ternary_pack_f32(w.x.data(), w.r.data(), w.x.size(), data.sparsity, w.packed.data());
     }},
    {"ternary_pack_bf16",
     [](const Kernels& k, const Data& data, Workload& w) {
       k.ternary_pack_bf16(w.x.data(), w.r16.data(), w.x.size(), data.sparsity, w.packed.data());
     }},
    {"zero_run_encode",
     [](const Kernels& k, const Data&, Workload& w) {
       for (size_t first = 0; first < w.packed.size(); first += kMaxRunInput) {
         benchmark::DoNotOptimize(k.zero_run_encode(&w.packed[first],
                                                    std::min(kMaxRunInput, w.packed.size() - first),
                                                    w.frame.bytes.data()));
       }
     }},
    {"decode_add", [](const Kernels& k, const Data&,
                      Workload& w) { decode(k, w, &Kernels::zero_run_unpack_add); }},
    {"decode",
     [](const Kernels& k, const Data&, Workload& w) { decode(k, w, &Kernels::zero_run_unpack); }},
    {"unpack_add",
     [](const Kernels& k, const Data& data, Workload& w) {
       k.unpack_add(w.packed.data(), w.x.size(), data.sparsity, w.out.data());
     }},
    {"unpack",
     [](const Kernels& k, const Data& data, Workload& w) {
       k.unpack(w.packed.data(), w.x.size(), data.sparsity, w.out.data());
     }},
    {"narrow_bf16", [](const Kernels& k, const Data&,
                       Workload& w) { k.narrow_bf16(w.x.data(), w.x.size(), w.r16.data()); }},
    {"widen_add_bf16",
     [](const Kernels& k, const Data&, Workload& w) {
       k.widen_add_bf16(w.r16_before.data(), w.x.size(), w.out.data());
     }},
    {"add_f32", [](const Kernels& k, const Data&,
                   Workload& w) { k.add_f32(w.r_before.data(), w.x.size(), w.out.data()); }},
    {"divide", [](const Kernels& k, const Data&,
                  Workload& w) { k.divide(w.out.data(), w.x.size(), 1.0000001f); }},
};

bool same_bytes(const Kernels& k, const Operation& operation, const Data& data, size_t n) {
  Workload got(n, data), want(n, data);
  const auto run = [&](const Kernels& table, Workload& w) {
    encode(*find_kernels("scalar"), data, w);
    find_kernels("scalar")->ternary_pack_f32(w.x.data(), w.r.data(), n, data.sparsity,
                                             w.packed.data());
    w.reset();
    operation.run(table, data, w);
  };
  run(k, got);
  run(*find_kernels("scalar"), want);
  const auto same = [](const auto& a, const auto& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof *a.data()) == 0;
  };
  return same(got.r, want.r) && same(got.r16, want.r16) && same(got.out, want.out) &&
         same(got.packed, want.packed) && got.frame.sizes == want.frame.sizes;
}

using Seconds = std::chrono::duration<double>;

template <typename Function>
double seconds_of(Function function) {
  const auto start = std::chrono::steady_clock::now();
  function();
  benchmark::ClobberMemory();
  return Seconds(std::chrono::steady_clock::now() - start).count();
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
  const bool keeps_state = std::string(operation.name).find("pack_") == std::string::npos &&
                           std::string(operation.name) != "encode";
  encode(k, data, w);
  // Packed bytes for the operations on them.
  w.reset();
  k.ternary_pack_f32(w.x.data(), w.r.data(), n, w.frame.m, w.packed.data());
  w.reset();
  Buffer<float> copied(n);
  // In turns, but several at a time where all is in cache, so that each finds its own data there.
  const int turn = n < 1000000 ? 16 : 1;
  std::vector<double> times, memcpy_times;
  int in_turn = 0;
  for (auto _ : state) {
    if (!keeps_state) w.reset();
    const double time = seconds_of([&] { operation.run(k, data, w); });
    state.SetIterationTime(time);
    times.push_back(time);
    if (++in_turn < turn) continue;
    for (; in_turn > 0; --in_turn) {
      memcpy_times.push_back(
          seconds_of([&] { std::memcpy(copied.data(), w.x.data(), n * sizeof(float)); }));
    }
  }
  if (memcpy_times.empty()) return;
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
              ->Iterations(n < 1000000 ? 2000 : 15)
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
