#pragma once

// Compressed collectives over MPI.
//
// Each user's communicator is duplicated once, at the first call on it, so that nothing here mixes
// with its own traffic; that first call is collective, as MPI_Comm_dup is; which ranks
// share a machine is found in it, too. As with MPI's collectives, all ranks call the same functions
// on a communicator in the same order.
//
// Threads: with MPI_THREAD_MULTIPLE, threads may work at the same time as long as each has its own
// communicator. With MPI_THREAD_SERIALIZED one call here at a time, with MPI_THREAD_FUNNELED the
// main thread alone. `threads` of the options only compute and never call MPI.
//
// After kPeerMismatch, kPeerLost or any other failure but kNonFinite the operation is of no further
// use. Memory that MPI may still send from is then kept until the communicator is freed.

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradwire/codec.h"
#include "gradwire/exchange.h"
#include "gradwire/exchange_choice.h"
#include "gradwire/export.h"
#include "gradwire/layout.h"
#include "gradwire/status.h"

namespace gradwire::mpi {

inline constexpr double kDefaultTimeout = 60;

// Drives one exchange over a communicator: non-blocking sends, receives of whatever size comes.
// What the ranks exchange is compared before the first step: kPeerMismatch on every rank, naming
// two that differ and in what.
class GRADWIRE_EXPORT Engine {
 public:
  // Local, but for the first call on a communicator. `preface`: lines that must be equal on all
  // ranks beside the exchange's own description. The exchange's ranks are those of `comm`; where it
  // has more, the first step is kInvalidArgument. kInvalidArgument: MPI isn't initialised, comm is
  // an intercommunicator, a timeout that is not above 0. kPeerLost: MPI failed.
  static Result<Engine> create(MPI_Comm comm, std::unique_ptr<Exchange> exchange,
                               double timeout_seconds = kDefaultTimeout,
                               std::string_view preface = {});

  // For a rank that can't take part in what the others are about to do: they end with
  // kPeerMismatch and the reason at once, and need not wait for the timeout. Returns `reason`.
  static Status refuse(MPI_Comm comm, Status reason);

  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  ~Engine();

  // Begins a step. `bucket` is worked in until it is done. All ranks give the same step.
  Status start(std::span<float> bucket, uint64_t step);
  // Moves what can be moved without waiting; true when the step is done. Nothing moves between the
  // calls: MPI has no thread for it, and neither has this.
  //   kPeerLost: a rank from which something is due was silent for the timeout; the message names
  //   it, also where this rank only waited for one that waited for it.
  //   Whatever the exchange finds.
  Result<bool> test();
  Status wait();

  // For workers and servers (gradwire/server.h), which go on each at their own pace: any worker's
  // push is taken as it comes, late ones too, and answered. A server's step is a version; `step` of
  // workers is their own count. A worker does
  //
  //   for (; !trained_enough() && !engine.over(); ++step) { start(gradient, step), wait() }
  //   leave()
  //
  // and a server, from the version on that its exchange begins with:
  //
  //   for (; !engine.over(); ++version) { start(bucket, version), wait() }
  //   leave()
  //
  // A server waits for as many pushes as it needs: kPeerLost is when all that it waits for were
  // silent. Between its versions, test() answers the workers whose messages have come.

  // After a step: whether it ended undone, as too many have left. A server's version then never
  // gets the pushes that it needs; for a worker it is a server that makes no further version.
  [[nodiscard]] bool over() const noexcept;
  // This rank's last call here: notifies the others, then takes and answers what still comes until
  // all have called it. Training ends for all ranks when a server leaves. kPeerLost as test() says,
  // also where a worker that training went on without never came back. Does nothing for other
  // exchanges.
  Status leave();

  [[nodiscard]] Exchange& exchange() noexcept;
  // Bytes handed to MPI and got from it, those of the comparison among them.
  [[nodiscard]] uint64_t bytes_sent() const noexcept;
  [[nodiscard]] uint64_t bytes_received() const noexcept;

 private:
  class Driver;
  explicit Engine(std::unique_ptr<Driver> driver);

  std::unique_ptr<Driver> driver_;
};

struct Options {
  std::string codec = "3lc";
  std::string pull_codec = {};  // empty: as codec
  // Of all-reduce: one of exchanges() with its parameters, as "hierarchical:between=ring,ranks=4".
  // Without `ranks`, the ranks that MPI_COMM_TYPE_SHARED puts together are on one machine.
  std::string exchange = "sharded";
  uint64_t seed = 0;
  int threads = 1;
  double timeout_seconds = kDefaultTimeout;
  // What an all-reduced buffer holds, one tensor after the other. Empty: one tensor, all of which
  // takes the codec. Otherwise each has scales of its own, and those that are small, have fewer
  // than two dimensions or are excluded go raw, as LayoutOptions says.
  std::vector<TensorInfo> tensors = {};
  std::vector<LayoutRule> rules = {};
  std::vector<std::string> exclude = {};
  uint64_t min_numel = 256;
};

struct Traffic {
  uint64_t bytes_sent = 0;  // to all ranks together
  uint64_t bytes_received = 0;
};

// A collective operation on buffers that are bound to it, to be started once or again and again.
class GRADWIRE_EXPORT Operation {
 public:
  Operation(Operation&&) noexcept;
  Operation& operator=(Operation&&) noexcept;
  // To be waited for first. Else the others find this rank silent.
  ~Operation();

  // Reads sendbuf. Neither buffer may be touched until the operation is done.
  Status start();
  // As Engine::test. After start(), call one of these until the operation is done; encoding,
  // decoding and moving bytes all happen in them.
  //   kNonFinite, on every rank alike: some rank's values were NaN or Inf, so are the results of
  //   that; the message names rank and value. It can be started again; with error feedback this
  //   step's inputs on the other ranks are added to the next step's.
  Result<bool> test();
  Status wait();

  [[nodiscard]] const ExchangeStats& stats() const noexcept;
  [[nodiscard]] const Layout& layout() const noexcept;
  [[nodiscard]] Traffic traffic() const noexcept;

 private:
  friend class OperationMaker;
  class Implementation;
  explicit Operation(std::unique_ptr<Implementation> implementation);

  std::unique_ptr<Implementation> implementation_;
};

// In all of these:
//
// - sendbuf may be MPI_IN_PLACE (or equal to recvbuf): input and output are recvbuf then.
// - 16-bit values are widened, reduced in float32 and rounded to nearest, ties to even, at the end.
// - The result has the same bits on every rank.
// - Where one rank alone fails (an unknown codec, too many threads), the others get to know why.
//
// Blocking and non-blocking operations keep no residual: what the codec leaves out is lost, and
// "ef=on" in the codec is kInvalidArgument. Error feedback, which training needs, works only with
// the persistent operation that `*_init` gives, started once a step.

// Sum or average over all ranks of `count` values. TernGrad's exchange averages; its sum is the
// average times the number of ranks, rounded once more.
GRADWIRE_EXPORT Status all_reduce(const void* sendbuf, void* recvbuf, uint64_t count, Dtype dtype,
                                  Reduction reduction, MPI_Comm comm, const Options& options = {});
// Started; to be waited for.
GRADWIRE_EXPORT Result<Operation> iall_reduce(const void* sendbuf, void* recvbuf, uint64_t count,
                                              Dtype dtype, Reduction reduction, MPI_Comm comm,
                                              const Options& options = {});
// Not started. Keeps residuals, buffers and what the ranks agreed on from start to start.
GRADWIRE_EXPORT Result<Operation> all_reduce_init(const void* sendbuf, void* recvbuf,
                                                  uint64_t count, Dtype dtype, Reduction reduction,
                                                  MPI_Comm comm, const Options& options = {});

// Rank r gets block r of the reduced buffer. recvcount: values of a block; sendbuf has one for each
// rank. In place the result is the first block of recvbuf, as in MPI_Reduce_scatter_block. The
// options' exchange, pull codec and tensors don't apply.
GRADWIRE_EXPORT Status reduce_scatter(const void* sendbuf, void* recvbuf, uint64_t recvcount,
                                      Dtype dtype, Reduction reduction, MPI_Comm comm,
                                      const Options& options = {});
GRADWIRE_EXPORT Result<Operation> reduce_scatter_init(const void* sendbuf, void* recvbuf,
                                                      uint64_t recvcount, Dtype dtype,
                                                      Reduction reduction, MPI_Comm comm,
                                                      const Options& options = {});

// Every rank gets the blocks of all, its own among them as the others decode it. sendcount: values
// of a block. In place the input is this rank's block of recvbuf, as in MPI_Allgather.
GRADWIRE_EXPORT Status allgather(const void* sendbuf, void* recvbuf, uint64_t sendcount,
                                 Dtype dtype, MPI_Comm comm, const Options& options = {});
GRADWIRE_EXPORT Result<Operation> allgather_init(const void* sendbuf, void* recvbuf,
                                                 uint64_t sendcount, Dtype dtype, MPI_Comm comm,
                                                 const Options& options = {});

}  // namespace gradwire::mpi
