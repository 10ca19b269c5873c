#pragma once

// Compressed collectives over MPI.
//
// The first call on a communicator duplicates it, so that no message here mixes with the program's
// own. It also finds out which ranks share a machine. That first call is collective, as
// MPI_Comm_dup is. As with MPI's collectives, all ranks call the same functions on a communicator
// in the same order.
//
// Threads: with MPI_THREAD_MULTIPLE, threads may work at the same time if each has its own
// communicator. With MPI_THREAD_SERIALIZED only one call may run at a time, with
// MPI_THREAD_FUNNELED only the main thread may call. The threads of Options::threads only compute
// and never call MPI.
//
// Buffers may be in the memory of a CUDA device: they are copied to the host before a step and the
// result back after it, and both are waited for. What fills a buffer must have ended before the
// call. kDeviceError: a copy failed; the other ranks wait for this one until the timeout
// (kPeerLost).
//
// After kPeerMismatch, kPeerLost or any other failure but kNonFinite the operation cannot be used
// any more: every later call returns that failure. Memory from which MPI may still send is kept
// until the process ends.

#include <mpi.h>

#include <cstdint>
#include <memory>
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

// The codec of blocking and non-blocking operations whose options name none. They keep no residual,
// and the default codecs of exchanges are made for one.
inline constexpr std::string_view kCodecWithoutResidual = "bf16";

// Drives one exchange over a communicator, with non-blocking sends and receives of any size. Before
// the first step the ranks compare what they are about to exchange. If it differs, every rank gets
// kPeerMismatch, which names two ranks and the difference.
class GRADWIRE_EXPORT Engine {
 public:
  // Local, except for the first call on a communicator. `preface`: lines that must be equal on all
  // ranks, beside the exchange's own description. The exchange's ranks are those of `comm`; if it
  // has more, the first step is kInvalidArgument. kInvalidArgument: MPI isn't initialised, comm is
  // an intercommunicator, or the timeout is not above 0. kPeerLost: MPI failed.
  static Result<Engine> create(MPI_Comm comm, std::unique_ptr<Exchange> exchange,
                               double timeout_seconds = kDefaultTimeout,
                               std::string_view preface = {});

  // For a rank that can't take part in an exchange that the others are about to begin. They get
  // kPeerMismatch with the reason at once and need not wait for the timeout. Returns `reason`.
  static Status refuse(MPI_Comm comm, Status reason);

  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  ~Engine();

  // Begins a step, which works in `bucket` until it is done. All ranks give the same step.
  Status start(std::span<float> bucket, uint64_t step);
  // Moves the bytes that can be moved without waiting; true when the step is done. Nothing moves
  // between the calls, because neither MPI nor gradwire has a thread for it.
  //   kPeerLost: a rank from which a message must come was silent for the timeout. The message
  //   names it, also if this rank waited for another rank that waited for the silent one.
  //   Other failures have the statuses of the exchange.
  Result<bool> test();
  Status wait();

  // Workers and servers (gradwire/server.h) go on at their own pace. A server takes and answers
  // every worker's push when it comes, also a late push. A server's step is a version; a worker's
  // `step` is its own count. A worker does
  //
  //   for (; !trained_enough() && !engine.over(); ++step) { start(gradient, step), wait() }
  //   leave()
  //
  // and a server, from the version on that its exchange begins with:
  //
  //   for (; !engine.over(); ++version) { start(bucket, version), wait() }
  //   leave()
  //
  // A server waits for as many pushes as it needs, and gets kPeerLost if all ranks that it waits
  // for are silent. Between its versions, test() answers the workers whose messages have come.

  // Whether the last step ended without being done because too many ranks have left: on a server,
  // the version can no longer get the pushes that it needs; on a worker, a server makes no further
  // version.
  [[nodiscard]] bool over() const noexcept;
  // This rank's last call: it notifies the others, and then takes and answers messages until all
  // ranks have called it. Training ends for all ranks when a server leaves. kPeerLost: as for
  // test(), and also if a worker without which the training went on never came back. Does nothing
  // for other exchanges.
  Status leave();

  [[nodiscard]] Exchange& exchange() noexcept;
  // Bytes handed to MPI and received from it, including those of the first comparison.
  [[nodiscard]] uint64_t bytes_sent() const noexcept;
  [[nodiscard]] uint64_t bytes_received() const noexcept;

 private:
  class Driver;
  explicit Engine(std::unique_ptr<Driver> driver);

  std::unique_ptr<Driver> driver_;
};

struct Options {
  // Empty: that of the exchange (ExchangeInfo::default_codec) in persistent operations,
  // kCodecWithoutResidual in others.
  std::string codec = {};
  std::string pull_codec = {};  // empty: as codec
  // For all-reduce: one of exchanges() with its parameters, such as
  // "hierarchical:between=ring,ranks=4". Without `ranks`, a machine is a group of ranks as
  // MPI_COMM_TYPE_SHARED makes it.
  std::string exchange = "sharded";
  uint64_t seed = 0;
  int threads = 1;
  double timeout_seconds = kDefaultTimeout;
  // The tensors that an all-reduced buffer holds, one after the other. Empty: the buffer is one
  // tensor, and the codec applies to all of it. Otherwise each tensor has its own scales, and
  // tensors that are small, have fewer than two dimensions or are excluded go raw, as LayoutOptions
  // says.
  std::vector<TensorInfo> tensors = {};
  std::vector<LayoutRule> rules = {};
  std::vector<std::string> exclude = {};
  uint64_t min_numel = 256;
};

struct Traffic {
  uint64_t bytes_sent = 0;  // to all ranks together
  uint64_t bytes_received = 0;
};

// A collective operation that is bound to its buffers and can be started once or many times.
class GRADWIRE_EXPORT Operation {
 public:
  Operation(Operation&&) noexcept;
  Operation& operator=(Operation&&) noexcept;
  // Wait for the operation first; otherwise the other ranks find this rank silent.
  ~Operation();

  // Reads sendbuf. Neither buffer may be touched until the operation is done.
  Status start();
  // As Engine::test. After start(), call one of these until the operation is done; all encoding,
  // decoding and moving of bytes happens in them.
  //   kNonFinite, on every rank: some rank's values were NaN or Inf; the message names rank and
  //   value. The results are not finite either. The operation can be started again; with error
  //   feedback the other ranks' inputs of this step are added to those of the next.
  Result<bool> test();
  Status wait();

  [[nodiscard]] const ExchangeStats& stats() const noexcept;
  [[nodiscard]] const Layout& layout() const noexcept;
  [[nodiscard]] Traffic traffic() const noexcept;

 private:
  friend class OperationMaker;
  struct Implementation;
  explicit Operation(std::unique_ptr<Implementation> implementation);

  std::unique_ptr<Implementation> implementation_;
};

// In all of these:
//
// - sendbuf may be MPI_IN_PLACE or equal to recvbuf; recvbuf is then input and output.
// - 16-bit values are widened, reduced in float32 and rounded to nearest, ties to even, at the end.
// - The result has the same bits on every rank.
// - If one rank alone fails (an unknown codec, too many threads), the others learn the reason.
//
// Blocking and non-blocking operations keep no residual: the part that the codec leaves out is
// lost, and "ef=on" in the codec is kInvalidArgument. Without a codec they send bf16. Error
// feedback, which training needs, works only with the persistent operation that a function `*_init`
// makes and that is started in each step.

// Sum or average over all ranks of `count` values. TernGrad's exchange averages; its sum is the
// average times the number of ranks, rounded once more.
GRADWIRE_EXPORT Status all_reduce(const void* sendbuf, void* recvbuf, uint64_t count, Dtype dtype,
                                  Reduction reduction, MPI_Comm comm, const Options& options = {});
// The operation is started; wait for it.
GRADWIRE_EXPORT Result<Operation> iall_reduce(const void* sendbuf, void* recvbuf, uint64_t count,
                                              Dtype dtype, Reduction reduction, MPI_Comm comm,
                                              const Options& options = {});
// The operation is not started. It keeps residuals and buffers from start to start, and the ranks
// compare their arguments only once.
GRADWIRE_EXPORT Result<Operation> all_reduce_init(const void* sendbuf, void* recvbuf,
                                                  uint64_t count, Dtype dtype, Reduction reduction,
                                                  MPI_Comm comm, const Options& options = {});

// Rank r gets block r of the reduced buffer. recvcount: the values of a block; sendbuf has a block
// for each rank. In place, the result is the first block of recvbuf, as in
// MPI_Reduce_scatter_block. The options' exchange, pull codec and tensors don't apply.
GRADWIRE_EXPORT Status reduce_scatter(const void* sendbuf, void* recvbuf, uint64_t recvcount,
                                      Dtype dtype, Reduction reduction, MPI_Comm comm,
                                      const Options& options = {});
GRADWIRE_EXPORT Result<Operation> reduce_scatter_init(const void* sendbuf, void* recvbuf,
                                                      uint64_t recvcount, Dtype dtype,
                                                      Reduction reduction, MPI_Comm comm,
                                                      const Options& options = {});

// Every rank gets the decoded blocks of all ranks, including its own. sendcount: the values of a
// block. In place, the input is this rank's block of recvbuf, as in MPI_Allgather.
GRADWIRE_EXPORT Status allgather(const void* sendbuf, void* recvbuf, uint64_t sendcount,
                                 Dtype dtype, MPI_Comm comm, const Options& options = {});
GRADWIRE_EXPORT Result<Operation> allgather_init(const void* sendbuf, void* recvbuf,
                                                 uint64_t sendcount, Dtype dtype, MPI_Comm comm,
                                                 const Options& options = {});

}  // namespace gradwire::mpi
