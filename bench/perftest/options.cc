#include "perftest/options.h"

#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string_view>

#include "base/parse.h"
#include "gradwire/codec.h"

namespace gradwire::perftest {
namespace {

constexpr const char* kUsage =
    R"(gradwire-perftest: compressed all-reduce beside MPI_Allreduce, float32.

Usage: mpirun -n N gradwire-perftest [OPTION...]
  --min SIZE, --max SIZE  bytes of float32, with K, M or G: powers of 1024 (1M, 64M)
  --factor F              from size to size (4)
  --codec TEXT            (persistent: 3lc:s=1.00,coder=rice; blocking: bf16)
  --pull-codec TEXT       (as codec)
  --tensor VALUES         how many have a scale of their own, as layers do; 0: the buffer as a whole
                          has one (262144)
  --exchange TEXT         one of the exchanges below, with its parameters (sharded)
  --mode MODE             persistent: with error feedback, as training does; or blocking (persistent)
  --op OP                 sum or average (sum)
  --input WHAT            synthetic, or a safetensors file of gradients, tiled with noise (synthetic)
  --repetitions N         measured, of which the median counts (5)
  --warmups N             before them (2); with error feedback it takes hundreds until the bytes sent
                          are those of a training
  --plain-repetitions N   of MPI_Allreduce, without warm-ups; 0: none (as repetitions, with them)
  --threads N             that encode and decode on each rank (1)
  --seed N                of stochastic codecs (0)
  --timeout SECONDS       for a rank that is silent (600)
  --check                 also: results have the same bits on all ranks, and are those of
                          MPI_Allreduce where all codecs are raw

Columns, as in nccl-tests: time is that of the slowest rank; algbw = size / time; busbw = algbw *
2 (N - 1) / N; error: of one repetition's result, norm of the difference to MPI_Allreduce's over the
norm of that (with error feedback it is owed to the next ones); wire: bytes that rank 0 sent.
)";

}  // namespace

std::string usage() {
  std::string text = kUsage;
  text += "\nExchanges:\n";
  for (const ExchangeInfo* info : exchanges()) {
    if (info->has_servers) continue;
    text += "  " + std::string(info->name) + ": " + std::string(info->summary) + "\n";
    for (const CodecParameter& parameter : info->parameters) {
      text += "      " + std::string(parameter.name) + "=" + std::string(parameter.values) + ": " +
              std::string(parameter.help) + " (" + std::string(parameter.default_value) + ")\n";
    }
  }
  return text;
}

std::optional<std::string> parse(int argc, char** argv, Options& options) {
  const auto choose = [](std::string_view text, std::string_view yes, std::string_view no,
                         auto& target, auto when_yes, auto when_no) {
    if (text != yes && text != no) return false;
    target = text == yes ? when_yes : when_no;
    return true;
  };
  mpi::Options& collective = options.collective;
  struct Reader {
    std::function<bool(std::string_view)> read;
    const char* valid;
  };
  constexpr const char* kSize = "sizes as 100, 64K, 1M, 2G";
  constexpr const char* kCount = "whole numbers";
  const std::map<std::string_view, Reader> takes_value = {
      {"--min", {[&](auto text) { return parse_size(text, options.min_bytes); }, kSize}},
      {"--max", {[&](auto text) { return parse_size(text, options.max_bytes); }, kSize}},
      {"--factor",
       {[&](auto text) { return parse_whole(text, options.factor) && options.factor > 1; },
        "numbers above 1"}},
      {"--codec", {[&](auto text) { return collective.codec = text, true; }, ""}},
      {"--pull-codec", {[&](auto text) { return collective.pull_codec = text, true; }, ""}},
      {"--tensor", {[&](auto text) { return parse_whole(text, options.tensor_values); }, kCount}},
      {"--exchange", {[&](auto text) { return collective.exchange = text, true; }, ""}},
      {"--mode",
       {[&](auto text) {
          return choose(text, "persistent", "blocking", options.persistent, true, false);
        },
        "persistent and blocking"}},
      {"--op",
       {[&](auto text) {
          return choose(text, "sum", "average", options.reduction, Reduction::kSum,
                        Reduction::kAverage);
        },
        "sum and average"}},
      {"--input", {[&](auto text) { return options.input = text, true; }, ""}},
      {"--repetitions",
       {[&](auto text) {
          return parse_whole(text, options.repetitions) && options.repetitions > 0;
        },
        "whole numbers above 0"}},
      {"--warmups",
       {[&](auto text) { return parse_whole(text, options.warmups) && options.warmups >= 0; },
        kCount}},
      {"--plain-repetitions",
       {[&](auto text) {
          return parse_whole(text, options.plain_repetitions) && options.plain_repetitions >= 0;
        },
        kCount}},
      {"--threads", {[&](auto text) { return parse_whole(text, collective.threads); }, kCount}},
      {"--seed", {[&](auto text) { return parse_whole(text, collective.seed); }, kCount}},
      {"--timeout",
       {[&](auto text) {
          return parse_whole(text, collective.timeout_seconds) && collective.timeout_seconds > 0;
        },
        "numbers of seconds above 0"}},
  };
  std::set<std::string_view> given;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (!given.insert(name).second) return std::string(name) + " is given twice";
    if (name == "--check") {
      options.check = true;
      continue;
    }
    const auto found = takes_value.find(name);
    if (found == takes_value.end()) return "unknown option " + std::string(name);
    if (++i == argc) return std::string(name) + " needs a value";
    if (!found->second.read(argv[i])) {
      return std::string(name) + ": '" + argv[i] + "' is not valid; valid are " +
             found->second.valid;
    }
  }
  if (collective.codec.empty()) {
    collective.codec = options.persistent ? "3lc:s=1.00,coder=rice" : mpi::kCodecWithoutResidual;
  }
  for (const std::string& codec : {collective.codec, collective.pull_codec}) {
    if (codec.empty()) continue;
    const auto parsed = Codec::parse(codec);
    if (!parsed.ok()) return parsed.status().message();
  }
  const auto exchange = ExchangeChoice::parse(collective.exchange);
  if (!exchange.ok()) return exchange.status().message();
  if (options.min_bytes < sizeof(float) || options.min_bytes > options.max_bytes) {
    return std::string("--min must be at least 4 and at most --max");
  }
  return std::nullopt;
}

}  // namespace gradwire::perftest
