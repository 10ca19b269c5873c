// libgradwire_mpi_preload.so: compresses large MPI_Allreduce calls with MPI_FLOAT and MPI_SUM of an
// unchanged program (INCEPTIONN's selective collective). All other calls pass through; without
// GRADWIRE_MPI_CONFIG, all calls do.

#include <mpi.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/parse.h"
#include "engines/mpi/device.h"
#include "gradwire/mpi.h"

namespace gradwire::mpi {
namespace {

// Which calls are compressed, and how.
struct Config {
  Options options;
  uint64_t min_bytes = 1 << 20;  // smaller buffers are left alone
};

std::string_view trim(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

// Sets an option; the return value says whether the value is valid.
struct Key {
  std::string_view name;
  bool (*set)(std::string_view value, Config& config);
  std::string_view valid;
};

constexpr Key kKeys[] = {
    {"codec", [](std::string_view v, Config& c) { return !(c.options.codec = v).empty(); },
     "a codec"},
    {"pull-codec",
     [](std::string_view v, Config& c) { return !(c.options.pull_codec = v).empty(); }, "a codec"},
    {"exchange", [](std::string_view v, Config& c) { return !(c.options.exchange = v).empty(); },
     "an exchange"},
    {"min-bytes", [](std::string_view v, Config& c) { return parse_size(v, c.min_bytes); },
     "a size such as 100, 64K, 1M, 2G (powers of 1024)"},
    {"threads", [](std::string_view v, Config& c) { return parse_whole(v, c.options.threads); },
     "a whole number"},
    {"seed", [](std::string_view v, Config& c) { return parse_whole(v, c.options.seed); },
     "a whole number"},
    {"timeout",
     [](std::string_view v, Config& c) { return parse_whole(v, c.options.timeout_seconds); },
     "a number of seconds"},
};

// Reads a line `key = value`; # begins a comment. `lines`: where each key was given so far.
Status read_line(std::string_view text, int number, std::map<std::string_view, int>& lines,
                 Config& config) {
  std::string_view value = trim(text.substr(0, text.find('#')));
  if (value.empty()) return {};
  const auto refuse = [](const std::string& what) {
    return Status(StatusCode::kInvalidArgument, what);
  };
  const bool is_pair = value.find('=') != std::string_view::npos;
  const std::string line(value);
  const std::string_view name = trim(take_until(value, '='));
  value = trim(value);
  const auto key = std::ranges::find(kKeys, name, &Key::name);
  if (!is_pair || key == std::end(kKeys)) {
    std::string names;
    for (const Key& known : kKeys) names += (names.empty() ? "" : ", ") + std::string(known.name);
    return refuse("'" + line + "' is no line of key = value; keys: " + names);
  }
  if (const auto [before, is_new] = lines.emplace(key->name, number); !is_new) {
    return refuse(std::string(name) + " is given twice, first in line " +
                  std::to_string(before->second));
  }
  if (key->set(value, config)) return {};
  return refuse(std::string(name) + " is '" + std::string(value) + "'; valid is " +
                std::string(key->valid));
}

// Lines `key = value`. Keys: codec (which must be there), and the others of kKeys. Fails with path
// and line if the file can't be read, a line is no pair, a key is unknown or given twice, or a
// value is invalid.
Result<Config> read_config(const std::string& path) {
  std::ifstream file(path);
  if (!file) return Status(StatusCode::kInvalidArgument, path + ": can't be read");
  Config config;
  std::map<std::string_view, int> lines;
  int number = 0;
  for (std::string text; std::getline(file, text);) {
    const Status read = read_line(text, ++number, lines, config);
    if (read.ok()) continue;
    return Status(read.code(), path + ":" + std::to_string(number) + ": " + read.message());
  }
  if (config.options.codec.empty()) {
    return Status(StatusCode::kInvalidArgument, path + ": has no line 'codec = ...'");
  }
  // A call among this rank alone finds values that no call could use, also together.
  float value = 1;
  const Status tried = all_reduce(MPI_IN_PLACE, &value, 1, Dtype::kFloat32, Reduction::kSum,
                                  MPI_COMM_SELF, config.options);
  if (!tried.ok()) return Status(tried.code(), path + ": " + tried.message());
  config.options.exchange = ExchangeChoice::parse(config.options.exchange).value().text();
  return config;
}

struct Counters {
  uint64_t compressed = 0;  // calls
  uint64_t passed_on = 0;
  uint64_t not_finite = 0;  // compressed calls that were repeated without compression
  uint64_t value_bytes = 0;
  uint64_t sent_bytes = 0;
  double ring_bytes = 0;  // that an uncompressed ring would send for these values
};

struct Preload {
  std::optional<Config> config;  // without it all calls pass through
  std::mutex mutex;
  Counters counters;
};

int world_rank() {
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "gradwire: rank %d: %s\n", world_rank(), why.c_str());
  PMPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

// Warns of codecs that have error feedback by default, which is off here.
void warn_of_lost_residuals(const Options& options) {
  std::set<std::string> codecs = {options.codec};
  if (!options.pull_codec.empty()) codecs.insert(options.pull_codec);
  for (const std::string& text : codecs) {
    const Result<std::shared_ptr<const Codec>> codec = Codec::parse(text);
    if (!codec.ok() || codec.value()->residual_type() == ResidualType::kNone) continue;
    std::fprintf(
        stderr,
        "gradwire: WARNING: codec %s is made for error feedback, which an unchanged program "
        "can't have: what it leaves out of a sum is lost for good; write ef=off where that "
        "is wanted\n",
        text.c_str());
  }
}

void announce(const std::string& path, const Config& config) {
  if (world_rank() != 0) return;
  const Options& options = config.options;
  std::fprintf(stderr,
               "gradwire: MPI_Allreduce of MPI_FLOAT with MPI_SUM is compressed from %" PRIu64
               " bytes on: codec %s, pull codec %s, exchange %s, no error feedback (%s)\n",
               config.min_bytes, options.codec.c_str(),
               options.pull_codec.empty() ? options.codec.c_str() : options.pull_codec.c_str(),
               options.exchange.c_str(), path.c_str());
  warn_of_lost_residuals(options);
}

Preload& preload() {
  static Preload state;
  static std::once_flag once;
  std::call_once(once, [] {
    const char* path = std::getenv("GRADWIRE_MPI_CONFIG");
    if (path == nullptr && world_rank() == 0) {
      std::fputs("gradwire: nothing is compressed: GRADWIRE_MPI_CONFIG names no file\n", stderr);
    }
    if (path == nullptr || *path == '\0') return;
    Result<Config> config = read_config(path);
    if (!config.ok()) stop(config.status().message());
    announce(path, config.value());
    state.config = std::move(config).value();
  });
  return state;
}

// All ranks get the same answer, as all pass the same count, type, operation and communicator.
bool is_for_us(const Config& config, int count, MPI_Datatype datatype, MPI_Op op, MPI_Comm comm) {
  if (datatype != MPI_FLOAT || op != MPI_SUM || count < 1 || comm == MPI_COMM_NULL) return false;
  if (static_cast<uint64_t>(count) * sizeof(float) < config.min_bytes) return false;
  int inter = 0;
  int size = 0;
  PMPI_Comm_test_inter(comm, &inter);
  PMPI_Comm_size(comm, &size);
  return inter == 0 && size > 1;
}

// Calls the communicator's error handler, as MPI does; by default the handler ends the job.
int fail(MPI_Comm comm, const std::string& why) {
  std::fprintf(stderr, "gradwire: rank %d: compressed MPI_Allreduce: %s\n", world_rank(),
               why.c_str());
  PMPI_Comm_call_errhandler(comm, MPI_ERR_OTHER);
  return MPI_ERR_OTHER;
}

bool all_finite(std::span<const float> values) {
  bool all = true;
  for (const float value : values) all &= std::isfinite(value);
  return all;
}

int reduce_compressed(Preload& state, const void* sendbuf, float* recvbuf, int count,
                      MPI_Comm comm) {
  const auto n = static_cast<uint64_t>(count);
  // The input must outlive the compressed call, which is repeated if the input isn't finite.
  std::vector<float> copy;
  const void* const input = sendbuf == MPI_IN_PLACE ? recvbuf : sendbuf;
  if (is_on_device(input)) {
    copy.resize(n);
    const Status copied = copy_from_device(input, n * sizeof(float), copy.data());
    if (!copied.ok()) return fail(comm, copied.message());
  } else if (input == recvbuf) {
    copy.assign(recvbuf, recvbuf + n);
  }
  if (!copy.empty()) sendbuf = copy.data();
  std::vector<float> staged;  // the result, if it belongs on a device
  float* const device = is_on_device(recvbuf) ? recvbuf : nullptr;
  if (device != nullptr) {
    staged.resize(n);
    recvbuf = staged.data();
  }
  Result<Operation> operation = iall_reduce(sendbuf, recvbuf, n, Dtype::kFloat32, Reduction::kSum,
                                            comm, state.config->options);
  if (!operation.ok()) return fail(comm, operation.status().message());
  const Status status = operation.value().wait();
  if (!status.ok() && status.code() != StatusCode::kNonFinite) return fail(comm, status.message());
  // bf16 and fp16 send NaN and Inf, and what is too large for them as Inf.
  const bool not_finite = !status.ok() || !all_finite({recvbuf, n});
  int size = 1;
  PMPI_Comm_size(comm, &size);
  bool first_time = false;
  {
    const std::lock_guard lock(state.mutex);
    Counters& counters = state.counters;
    ++counters.compressed;
    counters.value_bytes += n * sizeof(float);
    counters.sent_bytes += operation.value().traffic().bytes_sent;
    counters.ring_bytes += 2.0 * (size - 1) / size * static_cast<double>(n * sizeof(float));
    first_time = not_finite && counters.not_finite++ == 0;
  }
  if (first_time && world_rank() == 0) {
    std::fprintf(stderr,
                 "gradwire: %s; this call is done again without compression, further ones like it "
                 "without a word\n",
                 status.ok() ? "a sum is not finite" : status.message().c_str());
  }
  if (not_finite) {
    const int repeated = PMPI_Allreduce(sendbuf, recvbuf, count, MPI_FLOAT, MPI_SUM, comm);
    if (repeated != MPI_SUCCESS) return repeated;
  }
  if (device == nullptr) return MPI_SUCCESS;
  const Status copied = copy_to_device(staged.data(), n * sizeof(float), device);
  return copied.ok() ? MPI_SUCCESS : fail(comm, copied.message());
}

void summarise(const Counters& counters) {
  if (world_rank() != 0) return;
  std::fprintf(stderr,
               "gradwire: rank 0: %" PRIu64 " calls of MPI_Allreduce compressed, %" PRIu64
               " passed on, %" PRIu64 " done again as they were not finite; %" PRIu64
               " bytes of values took %" PRIu64
               " bytes sent, %.0f without compression (ring): "
               "%.0f saved\n",
               counters.compressed, counters.passed_on, counters.not_finite, counters.value_bytes,
               counters.sent_bytes, counters.ring_bytes,
               counters.ring_bytes - static_cast<double>(counters.sent_bytes));
}

}  // namespace
}  // namespace gradwire::mpi

extern "C" {

__attribute__((visibility("default"))) int MPI_Allreduce(const void* sendbuf, void* recvbuf,
                                                         int count, MPI_Datatype datatype,
                                                         MPI_Op op, MPI_Comm comm) try {
  using namespace gradwire::mpi;
  Preload& state = preload();
  if (state.config && is_for_us(*state.config, count, datatype, op, comm)) {
    return reduce_compressed(state, sendbuf, static_cast<float*>(recvbuf), count, comm);
  }
  {
    const std::lock_guard lock(state.mutex);
    ++state.counters.passed_on;
  }
  return PMPI_Allreduce(sendbuf, recvbuf, count, datatype, op, comm);
} catch (const std::bad_alloc&) {
  return gradwire::mpi::fail(comm, "out of memory");
}

__attribute__((visibility("default"))) int MPI_Finalize() {
  using namespace gradwire::mpi;
  Preload& state = preload();
  if (state.config) summarise(state.counters);
  return PMPI_Finalize();
}

}  // extern "C"
