// The codec's share of an exchange's time: compares the CPU time of a step of one rank with that of
// the step's encodings and decodings, called directly.
//
//   gradwire-exchange-bench [EXCHANGE VALUES RANKS CODEC]
//
// Both run alternately in one thread, on the same amount of memory, and must give the same results.
// Messages are handed from rank to rank without a copy, so that no engine is measured.

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
  std::string exchange;
  uint64_t values;
  uint32_t ranks;
  std::string codec;
};

using Buckets = std::vector<std::vector<float>>;

std::shared_ptr<const Layout> make_layout(const Case& c) {
  return std::make_shared<const Layout>(
      require(Layout::create({{"weight", {c.values / 64, 64}}}, c.ranks, {.codec = c.codec})));
}

void fill(Buckets& buckets, const std::vector<float>& gradient) {
  for (std::vector<float>& bucket : buckets) std::ranges::copy(gradient, bucket.begin());
}

// All ranks of the exchange, which take turns.
class Ranks {
 public:
  Ranks(const Case& c, const std::vector<float>& gradient) : buckets_(c.ranks, gradient) {
    const auto layout = make_layout(c);
    for (uint32_t rank = 0; rank < c.ranks; ++rank) {
      ranks_.push_back(
          require(make_exchange(c.exchange, layout, rank, require(Execution::create()))));
    }
  }

  // Seconds of one step.
  double step(const std::vector<float>& gradient, uint64_t number) {
    fill(buckets_, gradient);
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
    return cpu_seconds() - begin;
  }

  [[nodiscard]] const Buckets& buckets() const { return buckets_; }

 private:
  std::vector<std::unique_ptr<Exchange>> ranks_;
  Buckets buckets_;
};

// The encodings and decodings of all ranks in one step of the exchange, called directly.
class Codings {
 public:
  Codings(const Case& c, const std::vector<float>& gradient)
      : is_ring_(c.exchange == "ring"),
        layout_(make_layout(c)),
        execution_(require(Execution::create())),
        buckets_(c.ranks, gradient),
        segments_of_(c.ranks) {
    const std::vector<Segment>& segments = layout_->segments();
    for (size_t i = 0; i < segments.size(); ++i) segments_of_[segments[i].owner].push_back(i);
    for (uint32_t rank = 0; rank < c.ranks; ++rank) {
      for (const Segment& segment : segments) {
        coded_.push_back({Residual(segment.push_codec->residual_type(), segment.n),
                          std::vector<std::byte>(segment.push_codec->max_payload_size(segment.n))});
      }
    }
  }

  double step(const std::vector<float>& gradient, uint64_t number) {
    fill(buckets_, gradient);
    step_ = number;
    const double begin = cpu_seconds();
    double averaging = 0;
    is_ring_ ? push_around() : push_to_owners();
    for (uint32_t owner = 0; owner < ranks(); ++owner) {
      for (uint32_t rank = 0; rank < ranks(); ++rank) {
        const bool sends = is_ring_ ? rank == left_of(owner) : rank != owner;
        if (sends) add(owner, rank, owner);
      }
      const double before = cpu_seconds();
      for (size_t i : segments_of_[owner]) {
        for (float& value : values(owner, i)) value /= static_cast<float>(ranks());
      }
      averaging += cpu_seconds() - before;
      encode(owner, owner);
      decode(owner, owner, owner, DecodeMode::kStore);
    }
    for (uint32_t owner = 0; owner < ranks(); ++owner) {
      for (uint32_t rank = 0; rank < ranks(); ++rank) {
        if (rank != owner) decode(rank, owner, owner, DecodeMode::kStore);
      }
    }
    return cpu_seconds() - begin - averaging;
  }

  [[nodiscard]] const Buckets& buckets() const { return buckets_; }

 private:
  // The residual and the payload of a rank for a segment.
  struct Coded {
    Residual residual;
    std::vector<std::byte> payload;
    uint64_t size = 0;
  };

  [[nodiscard]] uint32_t ranks() const { return layout_->world_size(); }
  [[nodiscard]] uint32_t left_of(uint32_t rank) const { return (rank + ranks() - 1) % ranks(); }
  [[nodiscard]] Coded& coded(uint32_t rank, size_t i) {
    return coded_[rank * layout_->segments().size() + i];
  }
  [[nodiscard]] std::span<float> values(uint32_t rank, size_t i) {
    const Segment& segment = layout_->segments()[i];
    return std::span(buckets_[rank]).subspan(segment.bucket_offset, segment.n);
  }

  void push_to_owners() {
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      for (uint32_t owner = 0; owner < ranks(); ++owner) {
        if (rank != owner) encode(rank, owner);
      }
    }
  }
  // The hops of a ring up to the ranks before the owners.
  void push_around() {
    for (uint32_t hop = 1; hop < ranks(); ++hop) {
      for (uint32_t owner = 0; owner < ranks(); ++owner) {
        const uint32_t rank = (owner + hop) % ranks();
        if (hop > 1) add(rank, left_of(rank), owner);
        encode(rank, owner);
      }
    }
  }

  void encode(uint32_t rank, uint32_t shard) {
    for (size_t i : segments_of_[shard]) {
      Coded& to = coded(rank, i);
      to.size = require(layout_->segments()[i].push_codec->encode(
          values(rank, i), to.residual.view(), {.stream = i, .step = step_}, to.payload,
          execution_));
    }
  }
  void add(uint32_t rank, uint32_t source, uint32_t shard) {
    decode(rank, source, shard, DecodeMode::kAdd);
  }
  void decode(uint32_t rank, uint32_t source, uint32_t shard, DecodeMode mode) {
    for (size_t i : segments_of_[shard]) {
      const Coded& from = coded(source, i);
      require(layout_->segments()[i].push_codec->decode(std::span(from.payload).first(from.size),
                                                        values(rank, i), mode, execution_));
    }
  }

  bool is_ring_;
  std::shared_ptr<const Layout> layout_;
  Execution execution_;
  Buckets buckets_;
  std::vector<std::vector<size_t>> segments_of_;  // by owner
  std::vector<Coded> coded_;                      // one for each segment of each rank
  uint64_t step_ = 0;
};

void compare(const Buckets& exchanged, const Buckets& coded, bool draws) {
  for (size_t rank = 0; rank < exchanged.size(); ++rank) {
    // The direct calls draw other random numbers.
    const std::vector<float>& expected = draws ? exchanged[0] : coded[rank];
    if (std::memcmp(exchanged[rank].data(), expected.data(), expected.size() * sizeof(float))) {
      stop("the results of rank " + std::to_string(rank) + " differ");
    }
  }
}

void measure(const Case& c) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> gradient(c.values / 64 * 64);
  for (float& value : gradient) value = normal(random);
  Ranks ranks(c, gradient);
  Codings codings(c, gradient);
  const bool draws = require(Codec::parse(c.codec))->info().draws;
  std::vector<double> exchange_seconds;
  std::vector<double> codec_seconds;
  std::vector<double> shares;
  for (int i = 0; i < kWarmups + kRepetitions; ++i) {
    const double of_exchange = ranks.step(gradient, static_cast<uint64_t>(i)) / c.ranks;
    const double of_codec = codings.step(gradient, static_cast<uint64_t>(i)) / c.ranks;
    compare(ranks.buckets(), codings.buckets(), draws);
    if (i < kWarmups) continue;
    exchange_seconds.push_back(of_exchange);
    codec_seconds.push_back(of_codec);
    shares.push_back(of_codec / of_exchange);
  }
  std::printf("%-8s %10zu %6u  %-32s %12.3f %12.3f %8.2f\n", c.exchange.c_str(), gradient.size(),
              c.ranks, c.codec.c_str(), median(exchange_seconds) * 1e3, median(codec_seconds) * 1e3,
              median(shares));
  std::fflush(stdout);
}

}  // namespace
}  // namespace gradwire

// The commit of the working directory, if that is a clone.
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
  if (argc == 5) {
    cases.push_back({argv[1], std::strtoull(argv[2], nullptr, 10),
                     static_cast<uint32_t>(std::strtoul(argv[3], nullptr, 10)), argv[4]});
  } else if (argc == 1) {
    for (const char* exchange : {"sharded", "ring"}) {
      for (uint64_t values : {200'000ull, 25'600'000ull}) {
        for (uint32_t ranks : {2u, 8u}) {
          for (const char* codec :
               {"raw", "int8", "3lc:s=1", "3lc:s=1,residual=bf16", "3lc:s=1,bucket=4000",
                "3lc:s=1,bucket=4000,residual=bf16", "topk"}) {
            cases.push_back({exchange, values, ranks, codec});
          }
        }
      }
    }
  } else {
    std::fprintf(stderr, "usage: %s [EXCHANGE VALUES RANKS CODEC]\n", argv[0]);
    return 2;
  }
  utsname machine{};
  uname(&machine);
  std::printf("# %s %s, compiler %s, commit %s, SIMD %s, command: %s\n", machine.nodename,
              machine.machine, __VERSION__, commit().c_str(),
              std::string(gradwire::simd_targets().front()).c_str(), argv[0]);
  std::printf("# medians of %d steps, CPU time a rank; share = codec / exchange\n",
              gradwire::kRepetitions);
  std::printf("%-8s %10s %6s  %-32s %12s %12s %8s\n", "#", "values", "ranks", "codec",
              "exchange/ms", "codec/ms", "share");
  for (const Case& c : cases) gradwire::measure(c);
  return 0;
}
