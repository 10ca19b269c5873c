// gradwire-perftest: see usage().

#include <mpi.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "perftest/data.h"
#include "perftest/options.h"

namespace gradwire::perftest {
namespace {

struct Ranks {
  uint32_t rank = 0;
  uint32_t size = 1;
};

// The seconds of the slowest rank; all ranks start together.
template <typename Work>
double time_of(const Work& work) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  work();
  double seconds = MPI_Wtime() - start;
  MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return seconds;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& exact) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = double{got[i]} - double{exact[i]};
    error += difference * difference;
    norm += double{exact[i]} * double{exact[i]};
  }
  return norm > 0 ? std::sqrt(error / norm) : 0;
}

// FNV-1a over 32-bit words.
uint64_t digest(const std::vector<float>& values) {
  uint64_t hash = 0xcbf29ce484222325;
  for (float value : values) {
    uint32_t word = 0;
    std::memcpy(&word, &value, sizeof word);
    hash = (hash ^ word) * 0x100000001b3;
  }
  return hash;
}

bool is_lossless(const std::string& codec) { return Codec::parse(codec).value()->info().lossless; }

bool same_on_all_ranks(const std::vector<float>& values) {
  uint64_t ends[2] = {digest(values), ~digest(values)};
  MPI_Allreduce(MPI_IN_PLACE, ends, 2, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD);
  return ends[0] == ~ends[1];
}

[[noreturn]] void stop(const Ranks& ranks, const std::string& why) {
  std::fprintf(stderr, "gradwire-perftest: rank %u: %s\n", ranks.rank, why.c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

// The measurement of one size.
class Measurement {
 public:
  Measurement(const Ranks& ranks, const Options& options, const Data& data, uint64_t n)
      : ranks_(ranks),
        options_(options),
        collective_(options.collective),
        data_(data),
        input_(n),
        output_(n) {
    if (options.tensor_values == 0) return;
    collective_.min_numel = 0;
    for (uint64_t first = 0; first < n; first += options.tensor_values) {
      collective_.tensors.push_back(
          {"values " + std::to_string(first), {std::min(options.tensor_values, n - first), 1}});
    }
  }

  void run() {
    const double compressed = measure_compressed();
    std::optional<double> plain;
    if (options_.plain_repetitions != 0) plain = measure_plain();
    const bool failed = options_.check && !check(plain.has_value());
    if (ranks_.rank == 0) print(plain, compressed);
    if (failed) stop(ranks_, "the check failed");
  }

 private:
  using Reduce = std::function<void(uint64_t repetition)>;

  std::vector<double> repeat(int warmups, int repetitions, const Reduce& reduce) {
    std::vector<double> seconds;
    for (int i = -warmups; i < repetitions; ++i) {
      // The last repetition always has the same input, so that the last results can be compared.
      const auto repetition = static_cast<uint64_t>(repetitions - 1 - i);
      data_.fill(ranks_.rank, repetition, input_);
      const double one = time_of([&] { reduce(repetition); });
      if (i >= 0) seconds.push_back(one);
    }
    return seconds;
  }

  double measure_compressed() {
    const auto need = [&](const Status& status) {
      if (!status.ok()) stop(ranks_, status.message());
    };
    const uint64_t n = input_.size();
    std::optional<mpi::Operation> operation;
    if (options_.persistent) {
      Result<mpi::Operation> made =
          mpi::all_reduce_init(input_.data(), output_.data(), n, Dtype::kFloat32,
                               options_.reduction, MPI_COMM_WORLD, collective_);
      need(made.status());
      operation.emplace(std::move(made).value());
    }
    const std::vector<double> seconds =
        repeat(options_.warmups, options_.repetitions, [&](uint64_t) {
          if (!operation) {
            need(mpi::all_reduce(input_.data(), output_.data(), n, Dtype::kFloat32,
                                 options_.reduction, MPI_COMM_WORLD, collective_));
            return;
          }
          const uint64_t before = operation->traffic().bytes_sent;
          need(operation->start());
          need(operation->wait());
          wire_bytes_ = operation->traffic().bytes_sent - before;
        });
    return median(seconds);
  }

  double measure_plain() {
    exact_.resize(input_.size());
    const bool few = options_.plain_repetitions > 0;
    const std::vector<double> seconds =
        repeat(few ? 0 : options_.warmups, few ? options_.plain_repetitions : options_.repetitions,
               [&](uint64_t) {
                 MPI_Allreduce(input_.data(), exact_.data(), static_cast<int>(input_.size()),
                               MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                 if (options_.reduction == Reduction::kSum) return;
                 for (float& value : exact_) value /= static_cast<float>(ranks_.size);
               });
    return median(seconds);
  }

  bool check(bool has_exact) {
    if (!same_on_all_ranks(output_)) {
      std::fprintf(stderr, "rank %u: results differ between ranks\n", ranks_.rank);
      return false;
    }
    const mpi::Options& collective = options_.collective;
    const std::string& pull =
        collective.pull_codec.empty() ? collective.codec : collective.pull_codec;
    const Result<ExchangeChoice> exchange = ExchangeChoice::parse(collective.exchange);
    const bool lossless = is_lossless(collective.codec) && is_lossless(pull) &&
                          is_lossless(exchange.value().within_codec());
    if (!has_exact || !lossless) return true;
    return relative_error(output_, exact_) < 1e-6;
  }

  void print(std::optional<double> plain, double compressed) const {
    const double bytes = static_cast<double>(input_.size() * sizeof(float));
    const double bus = 2.0 * (ranks_.size - 1) / ranks_.size;
    const auto columns = [&](double seconds) {
      const double algorithm_bandwidth = bytes / seconds * 1e-9;
      std::printf(" %12.1f %8.3f %8.3f", seconds * 1e6, algorithm_bandwidth,
                  algorithm_bandwidth * bus);
    };
    std::printf("%12.0f %12zu", bytes, input_.size());
    if (plain) {
      columns(*plain);
    } else {
      std::printf(" %12s %8s %8s", "-", "-", "-");
    }
    columns(compressed);
    const auto or_dash = [](bool there, const char* format, int width, double value) {
      if (there) {
        std::printf(format, width, value);
      } else {
        std::printf(" %*s", width, "-");
      }
    };
    or_dash(plain.has_value(), " %*.3g", 9, plain ? relative_error(output_, exact_) : 0);
    or_dash(wire_bytes_ > 0, " %*.0f", 11, static_cast<double>(wire_bytes_));
    or_dash(plain.has_value(), " %*.2f", 8, plain.value_or(0) / compressed);
    std::printf("\n");
    std::fflush(stdout);
  }

  const Ranks& ranks_;
  const Options& options_;
  mpi::Options collective_;
  const Data& data_;
  std::vector<float> input_;
  std::vector<float> output_;
  std::vector<float> exact_;
  uint64_t wire_bytes_ = 0;  // of one repetition; 0: not known
};

void print_head(const Ranks& ranks, const Options& options) {
  const mpi::Options& collective = options.collective;
  std::printf("# gradwire-perftest: %u ranks, codec %s, pull %s, exchange %s, %s, %s, input %s\n",
              ranks.size, collective.codec.c_str(),
              (collective.pull_codec.empty() ? collective.codec : collective.pull_codec).c_str(),
              collective.exchange.c_str(), options.persistent ? "persistent" : "blocking",
              options.reduction == Reduction::kSum ? "sum" : "average", options.input.c_str());
  std::printf("# %25s %30s %30s\n", "", "MPI_Allreduce", "gradwire");
  std::printf("#%11s %12s %12s %8s %8s %12s %8s %8s %9s %11s %8s\n", "size", "count", "time",
              "algbw", "busbw", "time", "algbw", "busbw", "error", "wire", "speedup");
  std::printf("#%11s %12s %12s %8s %8s %12s %8s %8s %9s %11s\n", "(B)", "(float32)", "(us)",
              "(GB/s)", "(GB/s)", "(us)", "(GB/s)", "(GB/s)", "", "(B)");
}

void run(const Options& options) {
  Ranks ranks;
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  ranks = {.rank = static_cast<uint32_t>(rank), .size = static_cast<uint32_t>(size)};
  Result<Data> data = Data::load(options.input);
  if (!data.ok()) stop(ranks, data.status().message());
  if (rank == 0) print_head(ranks, options);
  for (double bytes = static_cast<double>(options.min_bytes);
       bytes <= static_cast<double>(options.max_bytes); bytes *= options.factor) {
    Measurement(ranks, options, data.value(), static_cast<uint64_t>(bytes) / sizeof(float)).run();
  }
}

}  // namespace
}  // namespace gradwire::perftest

int main(int argc, char** argv) {
  using namespace gradwire::perftest;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--help") == 0 || std::strcmp(argv[i], "-h") == 0) {
      std::fputs(usage().c_str(), stdout);
      return 0;
    }
  }
  MPI_Init(&argc, &argv);
  Options options;
  const std::optional<std::string> wrong = parse(argc, argv, options);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (wrong) {
    if (rank == 0) std::fprintf(stderr, "gradwire-perftest: %s (see --help)\n", wrong->c_str());
    MPI_Finalize();
    return 2;
  }
  run(options);
  MPI_Finalize();
  return 0;
}
