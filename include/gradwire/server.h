#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gradwire/exchange.h"
#include "gradwire/exchange_choice.h"

namespace gradwire {

// Dedicated servers (3LC, sections 2 and 3): make_exchange("server", ...) with the parameters of
// ServerOptions, such as "server:backup=1". The last ranks of a layout with `servers` are the
// servers. They hold the model and its optimizer, each tensor whole on one of them. The ranks
// before them are workers.
//
//   push  a worker encodes its gradient for the tensors of each server; 1 packet to each server
//   pull  the server adds the pushes of one version in ascending order of ranks, divides by their
//         number, updates its model, and encodes the change once; all workers get the same bytes
//
// Bytes sent in a step for n values at b bits: by a worker n * b / 8, by the S servers together
// W * n * b / 8, plus headers; 2 messages on the longest way. Every value is quantized twice,
// whatever W is; error feedback in both directions keeps the error of the running sum bounded. The
// models of server and workers differ by the server's residual. Workers at the same version hold
// the same bits.
//
// With Pulls::kGradients the server has no model: it encodes the averages, and every worker steps a
// replica of the model by what it pulls (TernGrad, section 3.1, parameter localization). Segments
// whose push codec is terngrad then have shared scales, and the server adds trits:
//
//   scales  each worker sends each server the largest clipped magnitude of each of its tensors (of
//           each group, if terngrad has groups); the server sends all workers the largest of all
//   push    each worker draws its trits with these scales
//   pull    the server adds them as integers and sends the sums: frames of qsgd with levels from -W
//           to W and the unit scale / W, which decode to the average, without further quantization
//
// Bytes for n such values and S scales: 4 S and n * 2 / 8 (1.6 / 8 with pack=trits5) from a worker,
// 4 S and n * ceil(log2(2 W + 1)) / 8 to it, each with its scales, 4 S, plus headers; 4 messages on
// the longest way. A version needs the scales of all workers, so backup and staleness are 0. The
// pull codec of these segments is terngrad too, which stands for qsgd with the bits that the sums
// need, or qsgd with levels=W.
//
// A *version* is one update of a server's tensors. A worker pushes for the version after the last
// that it pulled, or, with `staleness`, for up to that many versions later. If a push comes after
// its version was finished, the server drops it and answers with all versions that the worker
// lacks; the worker's next push is then for the version under way. If a worker has a newer version
// from one server than from another, its step is for the oldest, and it sends no push to the
// servers that are ahead, but asks them for newer versions (a packet without frames, 32 bytes).
//
// With turns=any a worker whose push has come may be given another turn: it then pushes a gradient
// of its next images for the same version, in the turn of a worker that was not sent the version
// before. A version is finished when the first `workers - backup` pushes have come, whoever sent
// them (TensorFlow's SyncReplicasOptimizer, which 3LC extends: section 2.1). The server adds the
// first pushes of all workers, then the others, each in ascending order of ranks; a turn is a
// packet without frames, 32 bytes.
//
// A model can be cut into parts with an exchange each, so that a part is pushed while others are
// computed (Layout's `owner`). A step pushes for the oldest next_version() of the parts; those that
// are ahead hold_back().

// A server's side, which make_exchange makes for its ranks. start() begins the version `step`,
// which must be version(); done() says that this version is complete. ExchangeOptions::update gets
// the averages of this server's tensors in the bucket and replaces them by the model's change. It
// is not called for a version with NaN or Inf. When another version is complete, the bucket holds
// the change as workers decode it, so that a server can keep a copy of the workers' model.
//
// With Pulls::kGradients there is no `update` (kInvalidArgument), and a complete version is the
// average. Without backup, a push for a complete version is an error.
class GRADWIRE_EXPORT ServerSide : public Exchange {
 public:
  // The number of finished versions of this server's tensors, which is also the number of the
  // version under way.
  [[nodiscard]] virtual uint64_t version() const = 0;
  // Sets the version from which a resumed run goes on. Call it before the first step; without it
  // all begin with version 0. kUnexpectedMessage: a step was taken already.
  virtual Status set_version(uint64_t version) = 0;
  // For each worker, the number of pushes that came too late.
  [[nodiscard]] virtual const std::vector<uint64_t>& dropped_pushes() const = 0;
  // The workers whose push of the version under way has come, in ascending order.
  [[nodiscard]] virtual std::vector<uint32_t> pushed() const = 0;
  // With Behind::kReport: the workers that lack more versions than are kept. They need the model
  // itself, as the other workers have it at version().
  [[nodiscard]] virtual std::vector<uint32_t> behind() const = 0;
  // Says that this worker was given that model. kInvalidArgument: it was not in behind().
  virtual Status caught_up(uint32_t worker) = 0;
  // Goes on without this worker, beside those in `backup`: no version waits for it. Its push of the
  // version under way counts if it has arrived; nothing of it may be received any more.
  // kInvalidArgument: it is no worker, or trits have shared scales, which need all workers.
  virtual Status lose(uint32_t worker) = 0;
  // Between two versions, a process takes the place of a worker that was lost. The caller gives it
  // the model as the other workers have it at version(); the versions from there on are sent. Those
  // from `first` on wait for its pushes. Until its first push comes, join may be called again at
  // any time, with a later `first`: a process that joins several servers begins at the newest
  // version that one of them has.
  // kInvalidArgument: it is no worker, takes part already, or `first` is too low.
  // kUnexpectedMessage: a version is under way.
  virtual Status join(uint32_t worker, uint64_t first) = 0;
};

// A worker's side, which make_exchange makes for the other ranks. start() pushes the bucket, which
// must stay untouched until the next start. done() says that the next gradient may be computed, as
// at most `staleness` versions are pushed and not pulled. receive() takes messages then, too.
// `step` is only used for statistics.
//
// Everyone skips a version whose pushes were not finite: nothing is applied, and the values that
// this worker had sent for it go back into its residuals. Values in a push that came too late are
// lost. retract() does nothing.
//
// `server` is a server's rank in all functions; kInvalidArgument: it is not.
class GRADWIRE_EXPORT WorkerSide : public Exchange {
 public:
  // The number of versions of the server's tensors that were applied here; 0 if the rank is no
  // server.
  [[nodiscard]] virtual uint64_t version(uint32_t server) const = 0;
  // The version for which the next start pushes.
  [[nodiscard]] virtual uint64_t next_version() const = 0;
  // With turns=any: whether the next start pushes for a version once more. done() is true then,
  // although the version is still to come.
  [[nodiscard]] virtual bool has_turn() const = 0;
  // Leaves out the push of this step, because another part of the model is at an older version: a
  // push for a newer one might wait for other workers, while they wait for this worker. It asks the
  // servers for the versions that this worker lacks, and counts in dropped_pushes().
  virtual Status hold_back() = 0;
  // As ServerSide::set_version.
  virtual Status set_version(uint32_t server, uint64_t version) = 0;
  // For each server's rank, the number of pushes that this worker left out because it had a newer
  // version from that server than from another, or called hold_back().
  [[nodiscard]] virtual const std::vector<uint64_t>& dropped_pushes() const = 0;
  // Says that this worker now has the server's tensors as of `version`, which must be newer than
  // its own (else kInvalidArgument), and pulls from there. Gradients that it pushed for earlier
  // versions are lost.
  virtual Status catch_up(uint32_t server, uint64_t version) = 0;
  // Joins others, after set_version: the first push is for the version `first`, and the versions
  // before are pulled without one, into `bucket`, which must stay untouched until the first start.
  // kInvalidArgument: the rank is no server, or `first` is below version(server).
  // kLengthMismatch: the bucket has not layout.numel() values. kUnexpectedMessage: a step was taken
  // already.
  virtual Status join(uint32_t server, uint64_t first, std::span<float> bucket) = 0;
};

// The side of servers that an exchange is; null: it is not that side.
[[nodiscard]] GRADWIRE_EXPORT ServerSide* as_server(Exchange* exchange);
[[nodiscard]] GRADWIRE_EXPORT WorkerSide* as_worker(Exchange* exchange);

}  // namespace gradwire
