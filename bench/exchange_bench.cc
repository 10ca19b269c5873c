// How much of an exchange's time is its codec's: CPU time of a step of the sharded exchange, a
// rank, against the sum of the encodings and decodings that the step consists of, called directly.
//
//   gradwire-exchange-bench [VALUES RANKS CODEC]
//
// Both run in one thread of one process, by turns, and the medians are compared. Messages are
// handed from rank to rank without a copy, so that no engine is measured. First the results are
// checked.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <sys/utsname.h>

#include "gradwire/exchange.h"
#include "gradwire/residual.h"

namespace gradwire {
namespace {

constexpr int kWarmups = 2;
constexpr int kRepetitions = 7;

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "exchange_bench: %s\n", why.c_str());
  std::exit(1);
}

void require(const Status& status) {
  if (!status.ok()) stop(status.message());
}

template <typename T>
T require(Result<T> result) {
  require(result.status());
  return std::move(result).value();
}

struct Case {
  uint64_t values;
  uint32_t ranks;
  std::string codec;
};

std::shared_ptr<const Layout> make_layout(const Case& c) {
  return std::make_shared<const Layout>(
      require(Layout::create({{"weight", {c.values / 64, 64}}}, c.ranks, {.codec = c.codec})));
}

// All ranks of the exchange, in turns.
class Ranks {
 public:
  explicit Ranks(const Case& c, const std::vector<float>& gradient) {
    const auto layout = make_layout(c);
    for (uint32_t rank = 0; rank < c.ranks; ++rank) {
      ranks_.push_back(
          require(make_exchange("sharded", layout, rank, require(Execution::create()))));
      buckets_.push_back(gradient);
    }
  }

  // Seconds of one step.
  double step(const std::vector<float>& gradient, uint64_t number) {
    for (std::vector<float>& bucket : buckets_) std::ranges::copy(gradient, bucket.begin());
    const double begin = cpu_seconds();
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      require(ranks_[rank]->start(buckets_[rank], number));
    }
    while (!std::ranges::all_of(ranks_, [](const auto& rank) { return rank->done(); })) {
      for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
        for (const OutgoingMessage& message : ranks_[rank]->take_outgoing()) {
          require(ranks_[message.peer]->receive(rank, message.bytes));
        }
      }
    }
    const double seconds = cpu_seconds() - begin;
    for (const std::vector<float>& bucket : buckets_) {
      if (std::memcmp(bucket.data(), buckets_[0].data(), bucket.size() * sizeof(float)) != 0) {
        stop("the ranks' results differ");
      }
    }
    return seconds;
  }

 private:
  std::vector<std::unique_ptr<Exchange>> ranks_;
  std::vector<std::vector<float>> buckets_;
};

// The encodings and decodings of rank 0 in one step, called directly.
class Codings {
 public:
  explicit Codings(const Case& c, const std::vector<float>& gradient)
      : layout_(make_layout(c)), execution_(require(Execution::create())), bucket_(gradient) {
    for (const Segment& segment : layout_->segments()) {
      residuals_.emplace_back(segment.push_codec->residual_type(), segment.n);
      payloads_.emplace_back(segment.push_codec->max_payload_size(segment.n));
      sizes_.push_back(0);
    }
  }

  double step(const std::vector<float>& gradient, uint64_t number) {
    std::ranges::copy(gradient, bucket_.begin());
    const double begin = cpu_seconds();
    for (size_t i = 0; i < sizes_.size(); ++i) {
      if (owner(i) != 0) encode(i, number);
    }
    // Each of the other ranks pushes to this one.
    for (size_t i = 0; i < sizes_.size(); ++i) {
      if (owner(i) != 0) continue;
      if (number == 0) encode(i, number);
      for (uint32_t k = 1; k < layout_->world_size(); ++k) decode(i, DecodeMode::kAdd);
      encode(i, number);
    }
    for (size_t i = 0; i < sizes_.size(); ++i) decode(i, DecodeMode::kStore);
    return cpu_seconds() - begin;
  }

 private:
  [[nodiscard]] uint32_t owner(size_t i) const { return layout_->segments()[i].owner; }
  [[nodiscard]] std::span<float> values(size_t i) {
    return std::span(bucket_).subspan(layout_->segments()[i].bucket_offset,
                                      layout_->segments()[i].n);
  }
  void encode(size_t i, uint64_t number) {
    sizes_[i] = require(layout_->segments()[i].push_codec->encode(
        values(i), residuals_[i].view(), {.stream = i, .step = number}, payloads_[i], execution_));
  }
  void decode(size_t i, DecodeMode mode) {
    require(layout_->segments()[i].push_codec->decode(std::span(payloads_[i]).first(sizes_[i]),
                                                      values(i), mode, execution_));
  }

  std::shared_ptr<const Layout> layout_;
  Execution execution_;
  std::vector<float> bucket_;
  std::vector<Residual> residuals_;
  std::vector<std::vector<std::byte>> payloads_;
  std::vector<uint64_t> sizes_;
};

void measure(const Case& c) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> gradient(c.values / 64 * 64);
  for (float& value : gradient) value = normal(random);
  Ranks ranks(c, gradient);
  Codings codings(c, gradient);
  std::vector<double> exchange_seconds;
  std::vector<double> codec_seconds;
  for (int i = 0; i < kWarmups + kRepetitions; ++i) {
    const double of_exchange = ranks.step(gradient, static_cast<uint64_t>(i)) / c.ranks;
    const double of_codec = codings.step(gradient, static_cast<uint64_t>(i));
    if (i < kWarmups) continue;
    exchange_seconds.push_back(of_exchange);
    codec_seconds.push_back(of_codec);
  }
  const double exchange = median(exchange_seconds);
  const double codec = median(codec_seconds);
  std::printf("%10zu %6u  %-24s %12.3f %12.3f %8.2f\n", gradient.size(), c.ranks, c.codec.c_str(),
              exchange * 1e3, codec * 1e3, codec / exchange);
  std::fflush(stdout);
}

}  // namespace
}  // namespace gradwire

// Of the working directory's sources, where that is a clone.
std::string commit() {
  char text[64] = "unknown";
  FILE* git = popen("git describe --always --dirty 2>/dev/null", "r");
  if (git == nullptr) return text;
  if (std::fscanf(git, "%63s", text) != 1) std::strcpy(text, "unknown");
  pclose(git);
  return text;
}

int main(int argc, char** argv) {
  using gradwire::Case;
  std::vector<Case> cases;
  if (argc == 4) {
    cases.push_back({std::strtoull(argv[1], nullptr, 10),
                     static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10)), argv[3]});
  } else if (argc == 1) {
    for (uint64_t values : {200'000ull, 25'600'000ull}) {
      for (uint32_t ranks : {2u, 8u}) {
        for (const char* codec : {"3lc:s=1.75", "3lc:s=1,bucket=4000", "int8:ef=off", "qsgd"}) {
          cases.push_back({values, ranks, codec});
        }
      }
    }
  } else {
    std::fprintf(stderr, "usage: %s [VALUES RANKS CODEC]\n", argv[0]);
    return 2;
  }
  utsname machine{};
  uname(&machine);
  std::printf("# %s %s, compiler %s, commit %s, SIMD %s, command: %s\n", machine.nodename,
              machine.machine, __VERSION__, commit().c_str(),
              std::string(gradwire::simd_targets().front()).c_str(), argv[0]);
  std::printf("# medians of %d steps, CPU time a rank; share = codec / exchange\n",
              gradwire::kRepetitions);
  std::printf("#%9s %6s  %-24s %12s %12s %8s\n", "values", "ranks", "codec", "exchange/ms",
              "codec/ms", "share");
  for (const Case& c : cases) gradwire::measure(c);
  return 0;
}
